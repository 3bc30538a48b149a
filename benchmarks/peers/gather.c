// The least that a uniform sample can do on one thread: draw row numbers, copy those rows into arrays that exist
// already. No Python, no checks, no concurrent writers. A yardstick for `sample(n, out=batch)` of small rows; image
// rows are bound by memory, where several threads and stores past the cache beat it: `gather_images_threads` has both.
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

enum { MOST_THREADS = 64 };
enum { OBS = 68, ACTION = 24, REWARD = 4, DONE = 1, STRIDE = 168, AHEAD = 32, STACK = 4 };

static uint64_t state = 88172645463325252ull;

static inline int64_t draw(uint64_t rows) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return (int64_t)(((state >> 32) * rows) >> 32);
}

// Into the second cache: it takes more misses at once than the first.
static inline void prefetch_row(const char* row) {
    __builtin_prefetch(row, 0, 2);
    __builtin_prefetch(row + 64, 0, 2);
    __builtin_prefetch(row + 128, 0, 2);
    __builtin_prefetch(row + STRIDE - 1, 0, 2);
}

// Rows of one contiguous record each. The sizes are constants, so each copy is a few moves, not a call.
void gather_records(const char* rows, int64_t capacity, int64_t count, int64_t calls, int64_t* drawn, char* obs,
                    char* action, char* reward, char* next_obs, char* done) {
    for (int64_t call = 0; call < calls; call++) {
        for (int64_t i = 0; i < count; i++) drawn[i] = draw((uint64_t)capacity);
        for (int64_t i = 0; i < AHEAD && i < count; i++) prefetch_row(rows + drawn[i] * STRIDE);
        for (int64_t i = 0; i < count; i++) {
            if (i + AHEAD < count) prefetch_row(rows + drawn[i + AHEAD] * STRIDE);
            const char* row = rows + drawn[i] * STRIDE;
            memcpy(obs + i * OBS, row, OBS);
            memcpy(action + i * ACTION, row + OBS, ACTION);
            memcpy(reward + i * REWARD, row + OBS + ACTION, REWARD);
            memcpy(next_obs + i * OBS, row + OBS + ACTION + REWARD, OBS);
            memcpy(done + i * DONE, row + OBS + ACTION + REWARD + OBS, DONE);
        }
    }
}

// Rows whose two images make up nearly all bytes: two block copies each.
void gather_images(const char* rows, int64_t capacity, int64_t count, int64_t calls, int64_t image_bytes, char* obs,
                   char* next_obs) {
    for (int64_t call = 0; call < calls; call++) {
        for (int64_t i = 0; i < count; i++) {
            const char* row = rows + draw((uint64_t)capacity) * 2 * image_bytes;
            memcpy(obs + i * image_bytes, row, (size_t)image_bytes);
            memcpy(next_obs + i * image_bytes, row + image_bytes, (size_t)image_bytes);
        }
    }
}

typedef struct {
    const char* rows;
    char *obs, *next_obs;
    int64_t capacity, first, last, calls, image_bytes;
    uint64_t state;
} Part;

// Past the cache where the processor can: nothing reads a batch of this size before it has left it.
static void copy_past_cache(char* to, const char* from, int64_t bytes) {
#ifdef __SSE2__
    int64_t at = 0;
    for (; at + 64 <= bytes; at += 64) {
        for (int part = 0; part < 4; part++)
            _mm_stream_si128((__m128i*)(to + at) + part, _mm_loadu_si128((const __m128i*)(from + at) + part));
    }
    memcpy(to + at, from + at, (size_t)(bytes - at));
#else
    memcpy(to, from, (size_t)bytes);
#endif
}

static void* gather_part(void* given) {
    Part* part = given;
    for (int64_t call = 0; call < part->calls; call++) {
        for (int64_t i = part->first; i < part->last; i++) {
            part->state = part->state * 6364136223846793005ull + 1442695040888963407ull;
            const int64_t drawn = (int64_t)(((part->state >> 32) * (uint64_t)part->capacity) >> 32);
            const char* row = part->rows + drawn * 2 * part->image_bytes;
            copy_past_cache(part->obs + i * part->image_bytes, row, part->image_bytes);
            copy_past_cache(part->next_obs + i * part->image_bytes, row + part->image_bytes, part->image_bytes);
        }
    }
    return NULL;
}

// The same by several threads, which start once and never wait for each other: what all cores can copy at most.
void gather_images_threads(const char* rows, int64_t capacity, int64_t count, int64_t calls, int64_t image_bytes,
                           char* obs, char* next_obs, int64_t threads) {
    pthread_t others[MOST_THREADS];
    Part parts[MOST_THREADS];
    if (threads > MOST_THREADS) threads = MOST_THREADS;
    for (int64_t t = 0; t < threads; t++) {
        parts[t] = (Part){rows,  obs,         next_obs,   capacity, count * t / threads, count * (t + 1) / threads,
                          calls, image_bytes, (uint64_t)t};
        if (t) pthread_create(&others[t], NULL, gather_part, &parts[t]);
    }
    gather_part(&parts[0]);
    for (int64_t t = 1; t < threads; t++) pthread_join(others[t], NULL);
}

// Rows that share their frames: five neighbours become two stacks of four.
void gather_stacks(const char* frames, int64_t capacity, int64_t count, int64_t calls, int64_t image_bytes, char* obs,
                   char* next_obs) {
    const int64_t frame_bytes = image_bytes / STACK;
    for (int64_t call = 0; call < calls; call++) {
        for (int64_t i = 0; i < count; i++) {
            const char* first = frames + draw((uint64_t)(capacity - STACK)) * frame_bytes;
            memcpy(obs + i * image_bytes, first, (size_t)image_bytes);
            memcpy(next_obs + i * image_bytes, first + frame_bytes, (size_t)image_bytes);
        }
    }
}

// The least that an add of many rows can do: one copy of their bytes to where the ring stands.
void append_records(char* rows, int64_t capacity, int64_t count, int64_t calls, const char* source, int64_t* head) {
    for (int64_t call = 0; call < calls; call++) {
        if (*head + count > capacity) *head = 0;
        memcpy(rows + *head * STRIDE, source, (size_t)(count * STRIDE));
        *head += count;
    }
}
