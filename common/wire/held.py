"""Messages of held pages: what mac, broker and bridge say of pages that leave the host's memory.

Three routes. "hold": the mac process hands full pages to the broker, which journals them and says when their memory may
go and who else holds them. "pages": the broker has the bridge give pages to its worker, by naming where in the journal
they lie. "attention": the mac process asks the worker's pages directly, because a query is on the critical path.
Messages carry numbers only; what a page looks like in bytes is `PageForm` (page_form.py).
"""

from __future__ import annotations

from common.wire.message import Message
from common.wire.page_form import LINE_PAD_ELEMENTS as LINE_PAD_ELEMENTS
from common.wire.page_form import PageForm, PagePlace

# --- route "hold": mac -> broker and back ----------------------------------------------------------------------------


class OpenConversation(Message, frozen=True):
    """A conversation begins, or is looked for. Frame: its token ids, i32 [n_tokens]; may be empty."""

    ticket: int
    form: PageForm
    n_tokens: int

    @property
    def frame_bytes(self) -> tuple[int, ...]:
        return (4 * self.n_tokens,)


class ConversationOpened(Message, frozen=True):
    """`conversation` names it from now on. What the journal already has of these very tokens comes along: full pages
    of the positions [0, n_tokens), and where a recurrent state lies that was kept at a grid point <= n_tokens."""

    ticket: int
    conversation: int
    n_tokens: int
    places: tuple[PagePlace, ...] = ()
    state_position: int = 0
    """0: none is kept."""
    state_path: str = ""
    state_offset: int = 0
    state_bytes: int = 0
    state_xxh3: int = 0
    """Of the state_bytes at state_offset; the host reads them only if they have it."""


class KeepPage(Message, frozen=True):
    """Journal one full page of one layer. Frames: its keys, its values, and the page's token ids i32 [page_tokens]."""

    ticket: int
    conversation: int
    layer: int
    page: int
    page_tokens: int
    key_bytes: int
    value_bytes: int

    @property
    def frame_bytes(self) -> tuple[int, ...]:
        return (self.key_bytes, self.value_bytes, 4 * self.page_tokens)


class PageKept(Message, frozen=True):
    """The journal has the page, at the stated fsync level: from now on its memory may go."""

    ticket: int
    conversation: int
    place: PagePlace


class KeepState(Message, frozen=True):
    """Journal the recurrent state at a grid point. Frames: ROWS blob, and the token ids before it, i32 [position]."""

    ticket: int
    conversation: int
    position: int
    blob_bytes: int

    @property
    def frame_bytes(self) -> tuple[int, ...]:
        return (self.blob_bytes, 4 * self.position)


class StateKept(Message, frozen=True):
    """The journal has the state."""

    ticket: int
    conversation: int
    position: int


class CutConversation(Message, frozen=True):
    """Positions from n_tokens on are no longer what they were: their pages are void everywhere."""

    conversation: int
    n_tokens: int


class CloseConversation(Message, frozen=True):
    """The mac process gave this sequence up: its pages may be dropped from now on, oldest use first."""

    conversation: int


class HostHolds(Message, frozen=True):
    """What the mac process has in memory now: groups [group_first, ...) and n_tokens tokens in all; the broker plans
    by this."""

    conversation: int
    group_first: int
    n_tokens: int


class ReleaseGroups(Message, frozen=True):
    """Broker to mac, prepare: free the memory of the groups before group_end; every page of them is in the journal."""

    ticket: int
    conversation: int
    group_end: int


class GroupsReleased(Message, frozen=True):
    """Mac to broker, complete: the host holds the groups from group_first on. Less than asked: the rest is in use."""

    ticket: int
    conversation: int
    group_first: int


class Placed(Message, frozen=True):
    """Broker to mac: worker `worker` holds the groups [group_first, group_end) of all layers, and answers for them
    under this epoch. group_first == group_end: it holds none (any more)."""

    conversation: int
    worker: int
    """Number of the worker, and so of the "attention" route that leads to it."""
    epoch: int
    group_first: int
    group_end: int


class Room(Message, frozen=True):
    """Broker to mac: so many tokens of a conversation have room in the journal, with those that it has there already;
    clients are told a context of at most the host's limit and this."""

    tokens_journal: int


class WorkerErred(Message, frozen=True):
    """Mac to broker: an answer was late, wrong or damaged. `quarantine`: a shadow check failed; do not use it again."""

    worker: int
    epoch: int
    cause: str
    detail: str
    quarantine: bool = False


class PageLost(Message, frozen=True):
    """Broker to mac: the journal's copy of this page turned out damaged and is no more. Keep it anew if it is in
    memory; else what it held must be read again."""

    conversation: int
    layer: int
    page: int


class HoldFailed(Message, frozen=True):
    """The request with this ticket was not carried out; nothing of it was kept."""

    ticket: int
    code: int
    cause: str
    detail: str


# --- route "pages": broker -> bridge and back ------------------------------------------------------------------------


class WatchPages(Message, frozen=True):
    """I am the broker: tell me of PagesUp and PagesDown. Answered at once by the one that is true now. Said first, and
    again now and then: a bridge that was started anew knows nobody."""


class HoldPages(Message, frozen=True):
    """Have the worker make room for pages of this form; what it holds of another conversation is dropped."""

    ticket: int
    conversation: int
    form: PageForm
    bytes_wanted: int
    session: int = 0
    """Names the content for good, not for the life of a process. A worker that already holds pages of this form and
    session (the cable was cut, the bridge was started anew) keeps them; 0: it keeps none."""


class PagesGranted(Message, frozen=True):
    """The worker holds this conversation's pages now, up to tokens_max keys of every layer, under `epoch`."""

    ticket: int
    epoch: int
    conversation: int
    bytes_granted: int
    tokens_max: int
    n_keys: int = 0
    """Keys of every layer that it kept from before (HoldPages.session). What the broker knows to be void it cuts."""


class PushPage(Message, frozen=True):
    """Give the worker one page of one layer. The bridge reads it where `place` says; the worker checks its hash. Pages
    of a layer follow each other without gaps. A page that the worker holds already takes its place anew, and those
    behind it in that layer are gone."""

    ticket: int
    epoch: int
    conversation: int
    place: PagePlace


class PagePushed(Message, frozen=True):
    """The worker holds n_keys keys of that layer."""

    ticket: int
    epoch: int
    layer: int
    n_keys: int
    seconds: float


class CutPages(Message, frozen=True):
    """Have the worker forget the keys from n_keys on, in every layer."""

    ticket: int
    epoch: int
    n_keys: int


class PagesCut(Message, frozen=True):
    """The worker forgot them."""

    ticket: int
    epoch: int
    n_keys: int


class PagesUp(Message, frozen=True):
    """A worker that can hold pages is there; it holds none that count."""

    epoch: int
    device: str
    avail_bytes: int


class PagesDown(Message, frozen=True):
    """Its pages are lost to us: the attention channel is down."""

    epoch: int
    cause: str
    detail: str


class PagesPaced(Message, frozen=True):
    """How long answers take of late: wait_s for the way there and back, row_s for one row and one group. n_rows: of the
    newest query."""

    wait_s: float
    row_s: float
    n_rows: int


class PushFailed(Message, frozen=True):
    """The request with this ticket failed; `code` as ERR2 or the link says."""

    ticket: int
    epoch: int
    code: int
    cause: str
    detail: str


# --- route "attention": mac -> bridge and back -----------------------------------------------------------------------


class Attend(Message, frozen=True):
    """Attend the groups [group_first, group_end) of one layer. Frame: queries f32 [n_head_kv, n_group * n_tokens,
    head_dim], unscaled. Row g * n_tokens + t is token t of head g of a group; every row sees all keys."""

    epoch: int
    ticket: int
    layer: int
    n_tokens: int
    group_first: int
    group_end: int
    per_group: bool
    """One partial for each group; otherwise they are folded, oldest first, into one."""
    scale: float
    n_head_kv: int
    n_rows: int
    head_dim: int

    @property
    def frame_bytes(self) -> tuple[int, ...]:
        return (4 * self.n_head_kv * self.n_rows * self.head_dim,)


class Attended(Message, frozen=True):
    """The accumulators, oldest first. Frames: m f32 [n_parts, n_head_kv, n_rows], l of the same shape, O f32 [n_parts,
    n_head_kv, n_rows, head_dim], unnormalised."""

    epoch: int
    ticket: int
    n_parts: int
    n_keys: int
    n_keys_frozen: int
    n_head_kv: int
    n_rows: int
    head_dim: int
    total_ms: float
    frozen_ms: float
    generic_ms: float
    queue_ms: float
    round_trip_ms: float
    """Send of the query's first byte to its answer, on the bridge's clock."""

    @property
    def frame_bytes(self) -> tuple[int, ...]:
        n = 4 * self.n_parts * self.n_head_kv * self.n_rows
        return (n, n, n * self.head_dim)


class AttendFailed(Message, frozen=True):
    """The query with this ticket will not be answered."""

    epoch: int
    ticket: int
    code: int
    cause: str
    detail: str


_Keep = OpenConversation | KeepPage | KeepState | CutConversation | CloseConversation
MacToBroker = _Keep | HostHolds | GroupsReleased | WorkerErred
BrokerToMac = (
    ConversationOpened | PageKept | StateKept | ReleaseGroups | Placed | Room | PageLost | HoldFailed
)
BrokerToBridge = WatchPages | HoldPages | PushPage | CutPages
BridgeToBroker = PagesUp | PagesDown | PagesGranted | PagePushed | PagesCut | PagesPaced | PushFailed
MacToBridgeAttention = Attend
BridgeToMacAttention = Attended | AttendFailed
