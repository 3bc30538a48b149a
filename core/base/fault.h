// Places where a test lets the process die, by SIGKILL, as if the power of that process had gone. In a build for users
// there is nothing here: only -DSHARPWAVE_FAULTS=ON makes them.
#pragma once

namespace sharpwave {

// One name a place; tests/crash walks the list and fails where one of them is never reached.
#define SHARPWAVE_FAULTS_OF(X)                                                                         \
    X(create_before_name)    /* a file is whole but has no name yet */                                 \
    X(attach_at_door)        /* the first one in, before it looked at anything */                      \
    X(attach_half_recovered) /* rows dropped, counts not yet made to agree */                          \
    X(attach_before_settled) /* recovered, the door still shut */                                      \
    X(writer_taken)          /* a writer record is taken, its writer not yet made */                   \
    X(claim_ticket)          /* a ticket is taken, its block not yet */                                \
    X(claim_owner)           /* the block is taken, and still says what the lap before left */         \
    X(claim_linked)          /* the block before leads to this one, which says nothing yet */          \
    X(claim_block_ticket)    /* the block has its ticket, its writer's record still the one before */  \
    X(claim_record_ticket)   /* the record has the ticket, and still the head of the block before */   \
    X(row_writing)           /* words say WRITING, no byte is written */                               \
    X(row_copied)            /* bytes are there, words still say WRITING */                            \
    X(row_half_committed)    /* some rows of a group are committed */                                  \
    X(row_committed)         /* all are, nothing is counted */                                         \
    X(row_half_counted)      /* the block counts them, the record does not */                          \
    X(row_counted)           /* counted; the head has not moved */                                     \
    X(head_moved)            /* the head has; a full block is not let go yet */                        \
    X(heap_placed)           /* a value stands in the heap, its row does not point to it */            \
    X(next_waiting)          /* a next observation waits for a row that is not committed */            \
    X(final_kept)            /* a final observation stands in the heap, its row does not say so */     \
    X(close_ended)           /* a writer ended its episodes and still holds its record */              \
    X(reclaim_begun)         /* a dead writer was found */                                             \
    X(reclaim_settled)       /* its rows are settled, the count of its block is not */                 \
    X(reclaim_half_counted)  /* the block's count is, its record's is not */                           \
    X(reclaim_counted)       /* both are; it still owns its blocks */                                  \
    X(reclaim_freed)         /* its blocks are free, its record is not */                              \
    X(index_locked)          /* the index lock is held */                                              \
    X(index_half_taken_in)   /* new rows have masses, sums do not know, cursors have not moved */      \
    X(index_taken_in)        /* sums know, cursors have not moved */                                   \
    X(index_half_rebuilt)    /* sums are empty */                                                      \
    X(index_half_updated)    /* some priorities are new */                                             \
    X(index_updated)         /* all are, sums do not know */                                           \
    X(index_drawn)           /* a draw has taken its rows, nobody has them */                          \
    X(pace_reserved)         /* rows are reserved, the lock is held */                                 \
    X(save_rows_copied)      /* a snapshot has its rows */                                             \
    X(save_index_locked)     /* and is at its cut, with the index lock */                              \
    X(save_before_name)      /* is whole and on the disk, without a name */                            \
    X(leave_at_door)         /* the last one out */                                                    \
    X(leave_flushed)         /* everything is on the disk, the file is not called clean yet */         \
    X(clear_origin)          /* rows are cleared, the next ticket has not followed */                  \
    X(clear_ticket)          /* it has; no writer has noticed */                                       \
    X(claim_space)           /* the pages of a block's heap have their space, nothing else changed */  \
    X(publish_renaming)      /* a file that replaces another has a second name, not yet its own */     \
    X(claim_unlinked)        /* the block has no way back, the one before does not lead to it */       \
    X(settle_void)           /* a half-written row has the checksum of a void one, and says WRITING */ \
    X(retired_uncounted)     /* a row is retired, its writer's count does not say so */                \
    X(count_stored)          /* a record has its new count, and still what was to be taken off */      \
    X(mutable_begun)         /* a new row has its mutable values, its word still says WRITING */       \
    X(write_locked)          /* a write has its turn, nothing is written */                            \
    X(write_half_copied)     /* one field of a place is new, the others are not, nobody reads it */    \
    X(write_copied)          /* all are, the selector still names the other place */                   \
    X(write_published)       /* the selector names it, the block is not marked as changed */           \
    X(write_marked)          /* it is; other rows of the same write are not written yet */             \
    X(client_named)          /* a record has a client's token, and does not say that it holds */       \
    X(piece_begun)           /* a piece of a client's rows is said to begin, none is written */        \
    X(piece_written)         /* all are written, the client's count does not say so */                 \
    X(piece_accepted)        /* it does */                                                             \
    X(client_settled)        /* a dead writer's piece has its new bound, its count is the one before */

#if defined(SHARPWAVE_FAULTS)
enum class Fault : int {
#define SHARPWAVE_FAULT_NAME(name) name,
    SHARPWAVE_FAULTS_OF(SHARPWAVE_FAULT_NAME)
#undef SHARPWAVE_FAULT_NAME
        count,
};

// Kills the process if this is the place, and the turn, that arm() chose.
void fault_point(Fault place);

// From now on the process dies when `place` is reached for the `turn`-th time; turn 0 disarms. `before` is called then.
void arm(Fault place, int turn, void (*before)() = nullptr);
const char* fault_name(Fault place);

#define SHARPWAVE_FAULT(name) ::sharpwave::fault_point(::sharpwave::Fault::name)
#else
#define SHARPWAVE_FAULT(name) static_cast<void>(0)
#endif

}  // namespace sharpwave
