"""The engine behind sharpwave. Private: use the names of the package."""

from collections.abc import Callable, Sequence
import enum
from typing import Any


def set_leak_warnings(on: bool) -> None: ...

class Role(enum.IntEnum):
    """Which row of an example a leaf comes from."""

    own = 0

    reward = 1

    last = 2

    next = 3

class Codec(enum.IntEnum):
    none = 0

    lz4 = 1

    zstd = 2

class Order(enum.IntEnum):
    """How drawn rows follow each other."""

    weighted = 0

    recent = 1

    shuffle = 2

    fifo = 3

    lifo = 4

class Normalize(enum.IntEnum):
    batch = 0

    buffer = 1

    none = 2

class NewRows(enum.IntEnum):
    live_max = 0

    running_max = 1

    constant = 2

class StartNeeds(enum.IntEnum):
    """What a row needs to start an example."""

    nothing = 0

    rows = 1

    end = 2

class GoalStrategy(enum.IntEnum):
    future = 0

    final = 1

    episode = 2

class RowFlag(enum.IntEnum):
    terminated = 1

    truncated = 2

    void = 4

    cut = 64

class Exponents:
    """alpha, and beta from a start to an end in so many sample calls."""

    def __init__(self, alpha: float, beta_start: float, beta_end: float, beta_steps: float) -> None: ...

    @property
    def alpha(self) -> float: ...

    @property
    def beta_start(self) -> float: ...

    @property
    def beta_end(self) -> float: ...

    @property
    def beta_steps(self) -> float: ...

class IndexSetup:
    """What a new table keeps for its index."""

    def __init__(self, by_priority: bool, exponents: Exponents, numbers_steps: bool, counts_reads: bool) -> None: ...

class StartRule:
    """Which rows may start an example."""

    def __init__(self) -> None: ...

    @property
    def needs(self) -> StartNeeds: ...

    @needs.setter
    def needs(self, arg: StartNeeds, /) -> None: ...

    @property
    def length(self) -> int: ...

    @length.setter
    def length(self, arg: int, /) -> None: ...

    @property
    def stride(self) -> int: ...

    @stride.setter
    def stride(self, arg: int, /) -> None: ...

    @property
    def across(self) -> bool: ...

    @across.setter
    def across(self, arg: bool, /) -> None: ...

    @property
    def first_rows(self) -> bool: ...

    @first_rows.setter
    def first_rows(self, arg: bool, /) -> None: ...

    @property
    def per_episode(self) -> bool: ...

    @per_episode.setter
    def per_episode(self, arg: bool, /) -> None: ...

    @property
    def is_any(self) -> bool: ...

class IndexSettings:
    """How rows are drawn through the index."""

    def __init__(self) -> None: ...

    @property
    def eps(self) -> float: ...

    @eps.setter
    def eps(self, arg: float, /) -> None: ...

    @property
    def rank_based(self) -> bool: ...

    @rank_based.setter
    def rank_based(self, arg: bool, /) -> None: ...

    @property
    def stratified(self) -> bool: ...

    @stratified.setter
    def stratified(self, arg: bool, /) -> None: ...

    @property
    def normalize(self) -> Normalize: ...

    @normalize.setter
    def normalize(self, arg: Normalize, /) -> None: ...

    @property
    def mix(self) -> float: ...

    @mix.setter
    def mix(self, arg: float, /) -> None: ...

    @property
    def new_rows(self) -> NewRows: ...

    @new_rows.setter
    def new_rows(self, arg: NewRows, /) -> None: ...

    @property
    def new_priority(self) -> float: ...

    @new_priority.setter
    def new_priority(self, arg: float, /) -> None: ...

    @property
    def order(self) -> Order: ...

    @order.setter
    def order(self, arg: Order, /) -> None: ...

    @property
    def recent(self) -> int: ...

    @recent.setter
    def recent(self, arg: int, /) -> None: ...

    @property
    def max_reads(self) -> int: ...

    @max_reads.setter
    def max_reads(self, arg: int, /) -> None: ...

    @property
    def starts(self) -> StartRule: ...

    @starts.setter
    def starts(self, arg: StartRule, /) -> None: ...

class FieldLayout:
    """A field of the table's rows."""

    def __init__(self, name: str, dtype: str, item_bytes: int, shape: Sequence[int], stack: int, pads_zero: bool, codec: Codec, is_ragged: bool, gives_next: bool, follows: int, is_mutable: bool) -> None: ...

    @property
    def name(self) -> str: ...

class WindowSettings:
    def __init__(self, length: int, burn_in: int, bootstrap: int, across: bool) -> None: ...

class GoalSettings:
    """Hindsight; leaves by their numbers in the tree."""

    def __init__(self, strategy: GoalStrategy, ratio: float, achieved: int, desired: Sequence[int]) -> None: ...

class PaceSettings:
    def __init__(self, min_size: float, ratio: float, min_diff: float, max_diff: float) -> None: ...

class BatchSettings:
    """A sampler, a view and a pace."""

    def __init__(self) -> None: ...

    @property
    def n_step(self) -> int: ...

    @n_step.setter
    def n_step(self, arg: int, /) -> None: ...

    @property
    def gamma(self) -> float: ...

    @gamma.setter
    def gamma(self, arg: float, /) -> None: ...

    @property
    def newest(self) -> int: ...

    @newest.setter
    def newest(self, arg: int, /) -> None: ...

    @property
    def index(self) -> IndexSettings | None: ...

    @index.setter
    def index(self, arg: IndexSettings | None, /) -> None: ...

    @property
    def windows(self) -> WindowSettings | None: ...

    @windows.setter
    def windows(self, arg: WindowSettings | None, /) -> None: ...

    @property
    def goals(self) -> GoalSettings | None: ...

    @goals.setter
    def goals(self, arg: GoalSettings | None, /) -> None: ...

    @property
    def agents(self) -> list[tuple[int, int]]: ...

    @agents.setter
    def agents(self, arg: Sequence[tuple[int, int]], /) -> None: ...

    @property
    def pace(self) -> PaceSettings | None: ...

    @pace.setter
    def pace(self, arg: PaceSettings | None, /) -> None: ...

class Tree:
    """The shape of a row: names, nesting, dtypes."""

    def __init__(self, nodes: list[Any], leaves: list[Any], dones: list[int], by_agent: bool, rows_from: int, discount: tuple[int, ...] | None, weights: bool, relabelled: bool, truncated: bool, place_indices: bool, window: int) -> None: ...

    def new_batch(self, rows: int) -> dict[str, Any]:
        """Arrays for so many examples, not filled."""

    def check_out(self, rows: int, out: object) -> None:
        """Refuses arrays that a batch of so many examples cannot be put into."""

class Table:
    """Rows over a storage."""

    def name_rows(self, count: int, places: list[Any], leaves: list[Any], extras: list[Any], timeout: float | None, deliver: bool, odds: object | None = None) -> Reading: ...

    def row_memory(self) -> RowMemory: ...

    @property
    def field_offsets(self) -> list[int]: ...

    def history(self) -> dict[str, Any]: ...

    def begin_at(self, origin: int, first: int) -> None: ...

    def take_counters(self, history: dict[str, Any]) -> None: ...

    def priorities_of(self, serials: object, priorities: object) -> None: ...

    def write(self, indices: object, leaves: list[int], values: list[Any], skips_stale: bool, timeout: float | None) -> dict[str, int] | None: ...

    def client_rows(self, token: bytes) -> int | None:
        """
        How many rows of a client were accepted; None: its token is not known here.
        """

    def clients(self) -> list[tuple[bytes, int]]:
        """
        The clients whose tokens are known here, and how many rows of each were accepted.
        """

    @staticmethod
    def create(fields: Sequence[FieldLayout], capacity: int, width: int, writers: int, seed: int, checksums: bool, index: IndexSetup | None, description: str, path: str, replace: bool) -> Table: ...

    @staticmethod
    def attach(path: str, recover: bool = False, verify: bool = True, timeout: float = 1e+18) -> Table: ...

    @staticmethod
    def holders(path: str) -> list[int]:
        """Process ids of those who have a live file open."""

    @staticmethod
    def load(path: str, recover: bool = False) -> Table: ...

    def bind(self, tree: Tree, settings: BatchSettings) -> None:
        """
        Gives the table the shape that its rows have in Python, its view and its sampler.
        """

    def update_priorities(self, serials: object, priorities: object, timeout: float | None = None) -> tuple[int, int]: ...

    def update_at_once(self, serials: object, priorities: object, timeout: float | None = None) -> dict[str, int] | None: ...

    def set_alpha(self, alpha: float) -> None: ...

    def set_beta(self, start: float, end: float, steps: float) -> None: ...

    def exponents(self) -> Exponents: ...

    def sample(self, batch_size: int, out: object | None = None) -> dict[str, Any]: ...

    def sample_tensors(self, batch_size: int, out: object) -> bool: ...

    def sample_in_turn(self, batch_size: int, out: object | None, timeout: float | None, deliver: bool, odds: object | None = None) -> dict[str, Any]: ...

    def sample_goals(self, batch_size: int, out: object | None, timeout: float | None, goals: object, achieved: object | None, steps: object | None, leaf: int, odds: object | None = None) -> tuple[dict[str, Any], Any, Any, Any]: ...

    def settle(self, serials: object, delivered: bool) -> None:
        """What became of a batch that sample_in_turn() left open."""

    def pace_mark(self) -> int: ...

    def pace_wait(self, mark: int, seconds: float) -> int: ...

    def read(self, serials: object, skip_gone: bool, streams: Streams | None = None) -> dict[str, Any]: ...

    def live_serials(self) -> Any: ...

    def stats(self) -> dict[str, Any]: ...

    def huge_page_bytes(self) -> int: ...

    def size(self) -> int: ...

    def clear(self) -> None: ...

    def save(self, path: str, incremental: bool = False) -> None: ...

    def flush(self) -> None: ...

    def close(self) -> None: ...

    @property
    def closed(self) -> bool: ...

    @property
    def capacity(self) -> int: ...

    @property
    def lost_at_open(self) -> int: ...

    @property
    def width(self) -> int: ...

    @property
    def path(self) -> str: ...

    @property
    def uuid(self) -> bytes:
        """Of the table, from its creation on: 16 random bytes."""

    @property
    def field_names(self) -> list[str]: ...

    @property
    def description(self) -> str: ...

class Draw:
    """The sample() of a table."""

    def __init__(self, table: Table, careful: object) -> None: ...

    def sample(self, batch_size: object, /, **kwargs: object) -> dict[str, object]:
        """See ReplayBuffer.sample."""

class Reading:
    """Rows that a GPU copies."""

    def holds(self) -> bool:
        """Whether none of them has changed since they were named."""

class RowMemory:
    """Where the rows of a table are."""

    @property
    def address(self) -> int: ...

    @property
    def row_bytes(self) -> int: ...

    @property
    def bytes(self) -> int: ...

    @property
    def file_offset(self) -> int: ...

    @property
    def used_slots(self) -> int: ...

def plan_blocks(fields: Sequence[FieldLayout], capacity: int, width: int, writers: int) -> tuple[int, int]: ...

def wait_for_file(path: str, seconds: float) -> bool: ...

shared_memory_folder: str = '/dev/shm'

class Streams:
    """Tells the stream and the episode of rows that are read in order."""

    def __init__(self, table: Table) -> None: ...

class Episodes:
    """The episodes of a table, oldest first."""

    def __init__(self, table: Table) -> None: ...

    def next(self, partial: bool, unfinished: bool) -> tuple[Any, int, int] | None: ...

    def starts(self) -> Any: ...

class Writer:
    """One stream of rows into a table."""

    def __init__(self, table: Table, prepare: object, read_leaf: object, takes_steps: bool, one_row: bool, client: bytes | None = None) -> None: ...

    def add(self, *args: object, **kwargs: object) -> Any:
        """Adds one row, or n rows with a leading axis, in the schema's order or by name."""

    def append_packed(self, body: object, first_row: int, wants_indices: bool, timeout: float | None = None) -> Any:
        """
        Adds rows that a Packer packed, numbered from first_row on; those accepted before are skipped. Returns how many rows are accepted now, and if asked for the handle of each row of the body, -1 for skipped and masked ones.
        """

    @property
    def accepted(self) -> int:
        """How many rows of its client were accepted; 0 without a client."""

    def go_on(self, env: int) -> None: ...

    def close(self) -> None: ...

class Packer:
    """Rows on their way to a table elsewhere."""

    def __init__(self, tree: Tree, fields: Sequence[FieldLayout], capacity: int, width: int, prepare: object, read_leaf: object, takes_steps: bool, one_row: bool, full: object, max_rows: int, max_bytes: int, linger_s: float) -> None: ...

    def add(self, *args: object, **kwargs: object) -> Any:
        """Packs one row, or n rows with a leading axis, in the schema's order or by name."""

    def take(self, room: int) -> bytearray | None:
        """
        The body of all pending rows behind so many free bytes; None if there are none. None is pending then.
        """

    def drop_last(self) -> None:
        """Takes back the rows of the newest add, if they are pending."""

    @property
    def max_rows(self) -> int:
        """So many pending rows call full()."""

    @max_rows.setter
    def max_rows(self, arg: int, /) -> None: ...

    @property
    def rows(self) -> int:
        """Pending rows."""

    @property
    def last_rows(self) -> int:
        """Rows of the newest add, masked ones too."""

    @property
    def bytes(self) -> int:
        """Bytes of their body."""

class StepWriter:
    """Copies one step of all environments into the columns of a rollout."""

    def __init__(self, columns: list[Any], takes_tensors: bool) -> None: ...

    def put(self, step: int, values: tuple[Any, ...]) -> bool: ...

def gae(rewards: object, values: object, dones: object, last_values: object, truncated: object | None, final_values: object | None, mask: object | None, gamma: float, gae_lambda: float, advantages: object, returns: object) -> None: ...

def discounted(rewards: object, dones: object, last_values: object, truncated: object | None, final_values: object | None, gamma: float, returns: object) -> None: ...

def vtrace(rewards: object, values: object, dones: object, last_values: object, truncated: object | None, final_values: object | None, mask: object | None, rhos: object, gamma: float, lam: float, rho_clip: float, c_clip: float, pg_rho_clip: float, targets: object, advantages: object) -> None: ...

def group_relative(rewards: object, groups: object, group_count: int, scales: bool, leaves_out: bool, eps: float, advantages: object) -> None: ...

class SlabLayout:
    def __init__(self, steps: int, envs: int, bytes: int, record_bytes: int, places: list[Any]) -> None: ...

class MappedFile:
    """A file mapped read-only, for its data to be drawn from."""

    def __init__(self, path: str, bytes: int) -> None: ...

    @property
    def is_unchanged(self) -> bool: ...

    @property
    def identity(self) -> tuple[int, int, int]: ...

    def array(self, begin: int = 0) -> object:
        """The bytes from there on; the array keeps the mapping."""

class RowKinds:
    def __init__(self, leaves: list[Any]) -> None: ...

    def __len__(self) -> int: ...

class TrajectoryDraw:
    @property
    def ids(self) -> object: ...

    @property
    def steps(self) -> object: ...

    @property
    def envs(self) -> object: ...

    @property
    def hits(self) -> int: ...

    @property
    def missing(self) -> list[int]: ...

    def fill(self, number: int, slab: object, layout: object) -> None: ...

    def gather(self, kinds: RowKinds) -> list[Any]: ...

class Trajectories:
    def __init__(self) -> None: ...

    def __len__(self) -> int: ...

    @property
    def first(self) -> int: ...

    def rows(self, window: int) -> int: ...

    def append(self, id: int, steps: int, envs: int) -> None: ...

    def extend(self, ids: object, steps: object, envs: object) -> None: ...

    def drop(self, count: int) -> None: ...

    def hold(self, number: int, slab: object, layout: object) -> None: ...

    def slab(self, number: int) -> object: ...

    def let_go(self, number: int) -> None: ...

    def draw(self, count: int, window: int, seed: int, call: int) -> TrajectoryDraw: ...

def new_slab(bytes: int) -> object:
    """Bytes of any value, in memory that is used again."""

def make_records(slab: object, layout: object, records: object, record_layout: object) -> None: ...

def copy_into_slab(slab: object, offsets: list[Any], arrays: list[Any]) -> None: ...

def exchange_paths(one: str, other: str) -> None:
    """Two names of files or folders change places, in one step."""

class Launch:
    def __init__(self, function: int, threads: int, shared: int, numbers: int, driver: str = 'libcuda.so.1') -> None: ...

    def run(self, stream: int, wide: int, high: int, numbers: object, steps: object | None = None, times: int = 0) -> None: ...

class FileLock:
    """
    A file that this object alone holds, until close() or the process' end.
    """

    def fileno(self) -> int:
        """
        The descriptor, for reading and writing; ClosedError in a forked child.
        """

    def is_named(self, path: str) -> bool:
        """Whether the path still names this very file."""

    @property
    def is_open(self) -> bool: ...

    def reserve(self, begin: int, size: int) -> bool:
        """
        Asks for the blocks of bytes that will be written; the size of the file stays. False where the disk is full or the file system has no such call: nothing has changed then.
        """

    def close(self) -> None: ...

def own_file(path: str, create: bool = True, timeout: float = 0.0) -> FileLock | None:
    """
    Opens a file and holds it alone; None where another holder keeps it until the timeout.
    """

class NewFile:
    """
    A file that gets its name when it is whole; a killed process leaves none.
    """

    def __init__(self, path: str) -> None: ...

    def write(self, data: object) -> None: ...

    @property
    def size(self) -> int: ...

    def own(self) -> FileLock:
        """
        Holds the file before it has its name: nobody else can own it in between.
        """

    def sync(self) -> None: ...

    def publish(self, replace: bool = True, sync: bool = True) -> None:
        """Gives it its name, in one step; with sync the name is on the disk."""

def crc32c(data: object, crc: int = 0) -> int: ...

def crc32c_combine(first: int, second: int, size: int) -> int:
    """
    The checksum of two runs of bytes one behind the other, the second of `size` bytes.
    """

class Checksum:
    """
    The CRC32C of pieces as one run of bytes. They must not change until it is known.
    """

    def __init__(self, pieces: list[Any]) -> None: ...

    @property
    def size(self) -> int:
        """Bytes of all pieces."""

    def begin(self) -> None:
        """Lets another thread compute it, unless one is at it."""

    def compute(self) -> None:
        """Computes it, unless another thread is at it."""

    def finish(self) -> int:
        """The checksum; computes it or waits for the thread that does."""

def survey_samples(samples: list[Any], type: type) -> tuple[list[str], list[int], list[int], list[int]] | None:
    """
    Of samples of one datum each: their ids, tokens and bytes; and the ends of runs of samples that have the same keys, shapes, dtypes and names of metadata. None where one has several data or another type.
    """

def pieces_of_columns(columns: list[Any], raw: Callable[[Any], Any]) -> tuple[str, int, list[Any]]:
    """
    All lengths as JSON, their sum, and the arrays: what is no contiguous array of numbers becomes what `raw` makes of it.
    """

def to_json(value: object | None) -> str:
    """
    What json.dumps makes, without spaces, of whole numbers, text, None and lists of them, in a quarter of the time.
    """

def make_all(type: type, count: int, **values: Any) -> list[Any]:
    """
    So many objects of a type with __slots__, without its __init__. A list has one value an object; anything else is the value of each.
    """

def set_all(type: type, objects: list[Any], **values: Any) -> None:
    """Sets attributes of objects that make_all() made, with values as there."""

class Zmq:
    """libzmq's functions, by their addresses in this process."""

def zmq(addresses: dict[str, int]) -> Zmq: ...

class Frame:
    """A message that came; a buffer of its bytes."""

    @property
    def is_valid(self) -> bool:
        """Whether it has a head of the protocol."""

    @property
    def version(self) -> int: ...

    @property
    def verb(self) -> int: ...

    @property
    def status(self) -> int: ...

    @property
    def session(self) -> int: ...

    @property
    def call(self) -> int: ...

    @property
    def argument(self) -> int: ...

    @property
    def body(self) -> memoryview:
        """What is behind the head."""

class MessageMemory:
    """
    Memory for a message, a buffer. It is sent without a copy, and used again afterwards.
    """

    def __init__(self, bytes: int) -> None: ...

    def __len__(self) -> int: ...

class Wire:
    """A connected socket of a client, used by one thread at a time."""

    def __init__(self, zmq: Zmq, socket: int) -> None: ...

    def close(self) -> bool:
        """
        Uses the socket no more. False: another thread waits at it, so it must not be freed yet.
        """

    def send(self, message: object | None, version: int, verb: int, flags: int, table: int, session: int, channel: int, stream: int, call: int, oldest: int, timeout: int, argument: int) -> bool:
        """
        Sends a message whose first 64 bytes are the space of the head. None: a head alone. False: there is no connection, or no room.
        """

    def take(self, session: int, call: int) -> Frame | None:
        """
        The next message, if it is the good answer to this call. None: nothing came, or something that receive() gives.
        """

    @property
    def has_early(self) -> bool:
        """Whether receive() has one at once, which take() left."""

    def receive(self) -> Frame | None:
        """The next message. None: nothing came within the socket's timeout."""

class BodyLayout:
    """Where the arrays of a batch stand in the body of a message."""

    def __init__(self, arrays: list[tuple[Any, list[int]]], names: tuple[str, ...] | None) -> None: ...

    def bytes(self, count: int) -> int:
        """Of the body of so many examples."""

    def memory(self, begin: int, count: int, more: int) -> MessageMemory:
        """Memory for a body that begins there, with so many bytes behind it."""

    def over(self, memory: object, begin: int, count: int) -> Any:
        """
        The arrays of a body that begins there, as views of the memory: a dict by the names, else a list.
        """

class HostedTable:
    """Draws batches into the replies of a server."""

def hosted_table(table: Table, blank: object, arrays: list[Any]) -> HostedTable: ...

class Event:
    """What the desk of a server hands over."""

    class Kind(enum.Enum):
        QUIET = 0

        BELL = 1

        HELLO = 2

        BYE = 3

        CALL = 4

        BARRED = 5

        GIVEN_UP = 6

        BROKEN = 7

        KEYS = 8

    @property
    def kind(self) -> Event.Kind: ...

    @property
    def came(self) -> float:
        """When it came, by the monotonic clock."""

    @property
    def version(self) -> int: ...

    @property
    def verb(self) -> int: ...

    @property
    def flags(self) -> int: ...

    @property
    def table(self) -> int: ...

    @property
    def session(self) -> int: ...

    @property
    def channel(self) -> int: ...

    @property
    def stream(self) -> int: ...

    @property
    def call(self) -> int: ...

    @property
    def argument(self) -> int: ...

    @property
    def timeout(self) -> float | None:
        """Seconds that the call may wait."""

    @property
    def user(self) -> str:
        """The public key that its sender has proved."""

    @property
    def body(self) -> memoryview: ...

class Desk:
    """
    Takes the messages of a server, and answers at once what can be answered at once.
    """

    def __init__(self, zmq: Zmq, socket: int, limits: dict[str, int]) -> None: ...

    def serve(self, look_s: float, timeout: float) -> Event:
        """
        Until something comes that it hands over, or a client was silent for longer than the timeout.
        """

    def host(self, number: int, table: HostedTable) -> None: ...

    def admit(self, session: int, user: str, version: int, roles: int) -> None: ...

    def set_roles(self, session: int, roles: int, is_barred: bool) -> None: ...

    def touch(self, session: int) -> None: ...

    def seen(self, session: int) -> float:
        """When the client was heard last, by the monotonic clock."""

    def part(self, session: int) -> None: ...

    def watch(self, path: bytes, device: int, inode: int, bytes: int, modified_ns: int, changed_ns: int) -> None: ...

    def hold(self, session: int, channel: int, call: int) -> None:
        """A call waits elsewhere; 0: none any more."""

    def oldest(self, session: int, channel: int) -> int: ...

    def drop_call(self, session: int) -> None: ...

    def reply(self, request: Event, memory: object, status: int, argument: int) -> None: ...

    def reply_bare(self, request: Event, status: int, text: str) -> None: ...

    def greet(self, request: Event, session: int, version: int, memory: object) -> None: ...

    def open_stream(self, session: int, table: int, number: int, writer: Writer) -> None: ...

    def close_stream(self, session: int, table: int, number: int) -> None: ...

    def client_stats(self, session: int, names: dict[int, str]) -> dict[str, Any]: ...

    def refused(self) -> dict[str, int]: ...

    @property
    def waiting_bytes(self) -> int: ...

    @waiting_bytes.setter
    def waiting_bytes(self, arg: int, /) -> None: ...
