"""The public ZeroMQ endpoint: what clients ask over it is carried out here, by the same trips as HTTP's.

The rules, which docs/zeromq.md tells its readers:
- A message is answered, always; one that cannot be read by an error. Only a client that is gone or cut hears nothing.
- A client takes tokens by credit. The host never waits for it: an answer that nobody takes waits in its Outflow, and
  ends with `slow_client` when that is full, or when nothing of it left for `stall_s`.
- A client that is silent for `lease_s`, or cannot be reached, has left: its requests are cancelled, and no others.

Everything runs on the event loop, and nothing in it waits for a client.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from common.errors import BusyError, OutriggerError, RemoteProtocolError
from common.limits import (
    PUBLIC_BUFFER_TOKENS_MAX,
    PUBLIC_CLIENTS_MAX,
    PUBLIC_PENDING_BYTES_MAX,
    PUBLIC_REQUESTS_MAX,
)
from common.log import get_log
from common.metrics import Metrics
from common.wire import public as p
from services.gateway.failures import PublicRefusal, error_body, status_of
from services.gateway.outflow import Outflow
from services.gateway.public_clients import Client
from services.gateway.public_reading import fields_of, generation_kind, read_generation, read_plain
from services.gateway.requests import DetokenizeRequest, TokenizeRequest
from services.gateway.streams import Broken
from services.gateway.trip import Trips
from services.runtime.bus import ForeignOwner, PeerGoneError, PeerStuckError

LOOK_EVERY_S = 10.0
TICK_S = 0.05
RULES_EVERY_S = 0.5

_log = get_log()


@dataclass(frozen=True, slots=True)
class Manners:
    """What clients are held to."""

    lease_s: float
    """Longest silence of a client."""
    stall_s: float
    """Longest wait of an answer for its client."""
    tokens_waiting_max: int = PUBLIC_BUFFER_TOKENS_MAX
    """Tokens of one answer that may wait for credit."""


class PublicDoor:
    """All clients of all endpoints. Give `heard` to the ForeignOwners, then `serve`."""

    def __init__(self, trips: Trips, manners: Manners, metrics: Metrics) -> None:
        self._trips = trips
        self._manners = manners
        self._metrics = metrics
        self._owners: list[ForeignOwner] = []
        self._clients: dict[tuple[int, bytes], Client] = {}
        self._pending_bytes = 0
        self._probe = False
        self._tasks: set[asyncio.Task[None]] = set()

    def listen(self, endpoint: str, keys: Any = None) -> ForeignOwner:
        """Open one more endpoint. The caller closes it, after `close`."""
        owner = ForeignOwner(endpoint, partial(self._heard, len(self._owners)), self._someone_left, keys)
        self._owners.append(owner)
        return owner

    async def tick(self) -> None:
        """Tries again what could not be sent, and holds clients to the rules, for ever. Somebody must run this."""
        looked_at = 0.0
        while True:
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            for key, client in list(self._clients.items()):
                if client.stuck:
                    self._flush(key, client)
            if self._probe:
                self._probe = False
                self._look_who_is_there()
            if now - looked_at >= RULES_EVERY_S:
                looked_at = now
                self._hold_to_rules(now)

    async def close(self, within_s: float = 0.3) -> None:
        """Let the last words leave, then end everything that still runs."""
        give_up_at = time.monotonic() + within_s
        while self._tasks and time.monotonic() < give_up_at:
            await asyncio.wait(self._tasks, timeout=max(0.0, give_up_at - time.monotonic()))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # --- clients

    def _heard(self, place: int, peer: bytes, frames: Sequence[Any]) -> None:
        """One message of a client. Never raises: it is called by a socket's reader."""
        key = (place, peer)
        client = self._clients.get(key)
        if client is None:
            client = Client(partial(self._owners[place].send, peer), time.monotonic())
            if len(self._clients) >= PUBLIC_CLIENTS_MAX:
                client.reply(
                    _failed("", BusyError(f"{PUBLIC_CLIENTS_MAX} clients are here; try again later"))
                )
                self._count("refused")
                self._flush(key, client)
                return
            self._clients[key] = client
        client.heard_at = time.monotonic()
        if client.n_cut:
            self._flush(key, client)
        if client.n_cut:  # it sends, and still does not read
            client.n_cut += 1
            self._count("unread")
            return
        try:
            self._obey(key, client, frames)
        except OutriggerError as error:
            self._refuse(key, client, p.id_in(frames), error)
        except Exception as error:
            _log.exception("message of a ZeroMQ client failed")
            self._refuse(key, client, p.id_in(frames), error)

    def _refuse(self, key: tuple[int, bytes], client: Client, ask_id: str, error: BaseException) -> None:
        """Answer with an error; one that bears the id of a request that runs would end that."""
        self._reply(key, client, _failed("" if ask_id in client.flows else ask_id, error))

    def _reply(self, key: tuple[int, bytes], client: Client, message: p.AnyAnswer) -> None:
        if not client.reply(message):
            self._count("unread", client.n_cut)
            self._cancel_all(client)
        self._flush(key, client)

    def _flush(self, key: tuple[int, bytes], client: Client) -> None:
        try:
            client.flush(time.monotonic())
        except PeerGoneError:
            self._forget(key, client, "gone")
        except OutriggerError as error:
            _log.warning("ZeroMQ client cannot be told", reason=str(error))
            self._forget(key, client, "gone")

    def _forget(self, key: tuple[int, bytes], client: Client, reason: str) -> None:
        """The client has left; what it asked is cancelled."""
        self._count(reason, client.drop_all())
        self._cancel_all(client)
        if self._clients.get(key) is client:
            del self._clients[key]

    def _cancel_all(self, client: Client) -> None:
        for task in list(client.tasks.values()):
            task.cancel()

    def _count(self, reason: str, n: int = 1) -> None:
        self._metrics.add("zmq_dropped_total", n, reason=reason)

    # --- rules

    def _someone_left(self) -> None:
        """A connection closed; ZeroMQ does not say whose. Sending tells."""
        self._probe = True

    def _look_who_is_there(self) -> None:
        for key, client in list(self._clients.items()):
            if client.flows or client.tasks:
                try:
                    self._owners[key[0]].send(key[1], p.encode(p.Alive()))
                except PeerStuckError:
                    continue
                except OutriggerError:
                    self._forget(key, client, "gone")

    def _hold_to_rules(self, now: float) -> None:
        for key, client in list(self._clients.items()):
            if now - client.heard_at > self._manners.lease_s:
                self._end_lease(key, client)
                continue
            for flow in list(client.flows.values()):
                if flow.stalled_s(now) > self._manners.stall_s:
                    self._end_stalled(key, client, flow)
        self._metrics.set("zmq_clients", len(self._clients))

    def _end_lease(self, key: tuple[int, bytes], client: Client) -> None:
        silence = (
            f"nothing was heard from this client for {self._manners.lease_s:g} s; send ping while you wait"
        )
        for flow in client.flows.values():
            flow.break_off(_failed(flow.id, PublicRefusal(408, "lease_over", silence)), time.monotonic())
        if not client.idle:
            self._flush(key, client)
        self._forget(key, client, "unread")

    def _end_stalled(self, key: tuple[int, bytes], client: Client, flow: Outflow) -> None:
        if (
            flow.closed and flow.n_tokens_waiting == 0
        ):  # only its last word waits, for a client that does not read
            return
        n_dropped = flow.n_tokens_waiting
        error = _slow(f"nothing of this answer was taken for {self._manners.stall_s:g} s", n_dropped)
        flow.break_off(_failed(flow.id, error), time.monotonic())
        self._count("unread", n_dropped)
        if task := client.tasks.get(flow.id):
            task.cancel()
        self._flush(key, client)

    # --- asks

    def _obey(self, key: tuple[int, bytes], client: Client, frames: Sequence[Any]) -> None:
        try:
            ask = p.decode_ask(frames)
        except RemoteProtocolError as error:
            self._count("malformed")
            raise PublicRefusal(400, "malformed", str(error)) from error
        match ask:
            case p.Grant():
                if flow := client.flows.get(ask.id):
                    flow.grant(ask.credit)
                    self._flush(key, client)
            case p.Cancel():
                self._cancel(key, client, ask.id)
            case p.Ping():
                pong = p.Pong(id=ask.id, ids=list(client.flows), lease_s=self._manners.lease_s)
                self._reply(key, client, pong)
            case p.Status():
                state = self._trips.status_body()
                self._reply(key, client, p.StatusTold(id=ask.id, state=state))
            case p.Generate() | p.Tokenize() | p.Detokenize():
                self._start(key, client, ask)

    def _cancel(self, key: tuple[int, bytes], client: Client, ask_id: str) -> None:
        """A request that is over already needs no answer: its last word is on the way."""
        if flow := client.flows.get(ask_id):
            flow.break_off(p.Cancelled(id=ask_id), time.monotonic())
            if task := client.tasks.get(ask_id):
                task.cancel()
            self._flush(key, client)

    def _start(self, key: tuple[int, bytes], client: Client, ask: Any) -> None:
        """A request with a body: it gets a task, within the bounds."""
        if ask.id in client.flows:
            raise PublicRefusal(
                409, "duplicate_id", f"a request with id {ask.id!r} is not over yet", param="id"
            )
        if len(client.flows) >= PUBLIC_REQUESTS_MAX:
            raise BusyError(
                f"{len(client.flows)} requests of this client are not over yet; wait for one to end"
            )
        n_bytes = memoryview(ask.body).nbytes
        if self._pending_bytes + n_bytes > PUBLIC_PENDING_BYTES_MAX:
            raise BusyError(f"bodies of {self._pending_bytes} bytes wait to be read; try again in a moment")
        credit = getattr(ask, "credit", 0)
        flow = Outflow(ask.id, credit, time.monotonic(), self._manners.tokens_waiting_max)
        client.flows[ask.id] = flow
        self._pending_bytes += n_bytes
        work = self._carry_out(key, client, ask, flow, n_bytes)
        task = asyncio.get_running_loop().create_task(work, name="zmq request")
        client.tasks[ask.id] = task
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _carry_out(
        self, key: tuple[int, bytes], client: Client, ask: Any, flow: Outflow, n_bytes: int
    ) -> None:
        """One request from body to last word, whatever happens."""
        pending = _Once(partial(self._prepared, n_bytes))
        try:
            match ask:
                case p.Tokenize():
                    tokens = await self._trips.tokenize(partial(read_plain, ask.body, TokenizeRequest))
                    flow.end(p.Tokens(id=ask.id, tokens=tokens), time.monotonic())
                case p.Detokenize():
                    content = await self._trips.detokenize(partial(read_plain, ask.body, DetokenizeRequest))
                    flow.end(p.Content(id=ask.id, content=content), time.monotonic())
                case p.Generate():
                    await self._generate(key, client, ask, flow, pending)
        except asyncio.CancelledError:
            error = PublicRefusal(503, "service_unavailable", "this server is stopping")
            flow.end(_failed(ask.id, error), time.monotonic())
        except Exception as error:
            if not isinstance(error, OutriggerError):
                _log.exception("ZeroMQ request failed")
            flow.end(_failed(ask.id, error), time.monotonic())
        finally:
            pending()
            if client.tasks.get(ask.id) is asyncio.current_task():
                del client.tasks[ask.id]
            self._flush(key, client)

    async def _generate(
        self, key: tuple[int, bytes], client: Client, ask: p.Generate, flow: Outflow, prepared: _Once
    ) -> None:
        fields = await self._trips.off_loop(fields_of, ask.body)
        kind = generation_kind(fields)
        async with self._trips.open(kind, partial(read_generation, fields, kind)) as trip:
            prepared()
            accepted = p.Accepted(
                id=ask.id,
                request_id=trip.request_id,
                model=trip.voice.model,
                seed=trip.job.sampling.seed,
                n_prompt=len(trip.job.ids),
                max_tokens=trip.job.max_tokens,
                lease_s=self._manners.lease_s,
            )
            flow.put(accepted, time.monotonic())
            while not flow.closed:
                pieces = await trip.take(LOOK_EVERY_S)
                report = trip.report if ask.report else _no_report
                flow.push(pieces, time.monotonic(), report)
                if pieces and isinstance(last := pieces[-1], Broken):
                    raise last.error
                if flow.overfull and not flow.closed:
                    raise _slow(f"more than {self._manners.tokens_waiting_max} tokens wait for credit", 0)
                self._flush(key, client)

    def _prepared(self, n_bytes: int) -> None:
        self._pending_bytes -= n_bytes


class _Once:
    """Calls `work` the first time only."""

    def __init__(self, work: Any) -> None:
        self._work = work

    def __call__(self) -> None:
        work, self._work = self._work, None
        if work is not None:
            work()


def _no_report(_last: object) -> None:
    return None


def _slow(why: str, n_dropped: int) -> PublicRefusal:
    told = f"; {n_dropped} tokens were dropped" if n_dropped else ""
    return PublicRefusal(408, "slow_client", f"{why}: the request was ended{told}. Grant credit as you read")


def _failed(ask_id: str, error: BaseException) -> p.Failed:
    """The error message of an error, worded as in HTTP."""
    told = error_body(error)["error"]
    told["kind"] = told.pop("type")
    return p.Failed(id=ask_id, status=status_of(error), **told)
