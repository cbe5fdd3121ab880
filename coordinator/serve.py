"""The coordinator's process: transport, ledger, scorer, service and REST in one nursery."""

from __future__ import annotations

import gc
import logging
import os
import time
from contextlib import AsyncExitStack, closing
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING

import trio

from echo2.p2p.daemon import STATUS_FILE, write_status
from echo2.p2p.errors import ConfigurationError
from echo2.p2p.guards import TransportLimits
from echo2.p2p.identity import load_or_create_identity
from echo2.p2p.join import JoinString
from echo2.p2p.libp2p_transport import open_libp2p_transport
from echo2.p2p.nat import NatCoordinator

from .access import COMMAND_LINE, OPERATOR, AccessBook
from .addresses import dialable
from .api import make_api
from .books import Books
from .created_runs import created_runs, with_created
from .database import IN_USE, read_password
from .event_feed import EventFeed
from .ledger import DatabaseAway, LedgerUnavailable, open_ledger
from .loop_lag import watch_loop_lag
from .operator_token import load_operator_token_hash, local_token
from .prompts import FolderText
from .release import software_version
from .rest_gate import Door
from .rest_guard import Rooms
from .rest_limits import Limits
from .rest_server import open_listener, serve_rest, url_of
from .rest_sessions import Sessions
from .rest_tls import server_context
from .run_judge import Judge
from .run_tools import open_each, open_tools
from .served import ServedRest
from .service import CoordinatorService
from .task_loading import check_task

if TYPE_CHECKING:
    from echo2.p2p.libp2p_transport import Libp2pTransport

    from .config import CoordinatorConfig
    from .ledger import Ledger
    from .operator_token import LocalToken

LIMITS = TransportLimits(inbound_max=4096, handshakes_max=512)
"""A pool of thousands, each with the connection from before a break beside its new one, which all come back at once."""

COLLECTIONS = (10_000, 20, 50)
"""Of garbage: after so many new objects, the younger half after so many of those, all after so many of these."""

STATUS_SECONDS = 1.0

DATABASE_SECONDS = 1.0
"""Between two looks for a database that is not there when we start."""

DISK_SECONDS = 2.0
"""Between two looks whether a full disk has room again."""

IN_USE_SECONDS = 40.0
"""After that it is no ghost of our own: see the keepalives in `database`."""

log = logging.getLogger(__name__)


async def serve(config: CoordinatorConfig) -> None:
    """Serve until cancelled. Raises ConfigurationError for what the operator must put right."""
    for run in config.all_runs:
        check_task(run)
    identity = load_or_create_identity(config.identity_path)
    token_sha256 = load_operator_token_hash(config.operator_token_path)
    certificate, key = config.rest.certificate, config.rest.key
    tls = server_context(certificate, key) if certificate is not None and key is not None else None
    listener = open_listener(config.rest.host, config.rest.port)
    url = url_of(listener, "http" if tls is None else "https")
    try:
        async with (
            open_libp2p_transport(
                identity, config.listen, announce=config.announce, state_dir=config.state_dir, limits=LIMITS
            ) as transport,
            AsyncExitStack() as stack,
        ):
            seconds = config.score_seconds_max
            tools = await open_each(stack, config.all_runs, item_seconds=seconds)
            password = read_password(config.database_password_file)
            with (
                closing(await _open_when_there(config, password)) as ledger,
                local_token(config.local_token_path) as local,
            ):
                tokens = {OPERATOR: token_sha256, COMMAND_LINE: local.digest}
                no_commands = local.write()
                nat = NatCoordinator(
                    transport,
                    admitted=lambda peer: service.admitted(peer),
                    found=lambda _peer: service.forget_plan(),
                    clock=trio.current_time,
                    wall=time.time,
                )
                try:
                    created = created_runs(ledger)
                    wanted = with_created(config, created)
                    others = [run for run in wanted.all_runs if run.name not in tools]
                    tools |= await open_each(stack, others, item_seconds=seconds, may_fail=True)
                    settings = wanted.model_copy(
                        update={"runs": tuple(run for run in wanted.runs if run.name in tools)}
                    )
                    first = tools[config.run.name]
                    service = CoordinatorService(
                        config=settings,
                        identity=identity,
                        transport=transport,
                        ledger=ledger,
                        scorer=first.scorer,
                        clock=trio.current_time,
                        wall=time.time,
                        entropy=os.urandom,
                        task=first.task,
                        text=first.text,
                        proved=nat.proved,
                        tools=tools,
                        created={name: text for name, text in created.items() if config.named(name) is None},
                        open_tools=partial(open_tools, item_seconds=seconds),
                    )
                except LedgerUnavailable as error:
                    raise ConfigurationError(error.detail) from error
                transport.tell_apart(service.admitted)
                rooms = Rooms(
                    desk=service,
                    access=AccessBook(ledger, own=tokens, wall=time.time, entropy=os.urandom),
                    sessions=Sessions(os.urandom),
                    books=Books(config.ledger_url, password),
                    feed=EventFeed(service),
                    judge=Judge(config, FolderText(config.run.model_dir), service.pool_view),
                    limits=Limits(),
                    join=lambda token, run="": str(
                        JoinString(
                            identity.peer_id, dialable(config, transport.addresses), token, run or service.any_run
                        )
                    ),
                    clock=trio.current_time,
                )
                proxy = config.rest.proxy_address
                door = Door(open_reads=config.rest.open_reads, tls=tls is not None or bool(proxy), proxy=proxy)
                api = make_api(rooms, door=door, version=software_version(), public_page=config.rest.public_page)
                log.info(
                    "peer id %s, listening on %s, REST on %s",
                    identity.peer_id,
                    ", ".join(transport.addresses),
                    url,
                )
                for view in service.runs_view():
                    log.info("the run %s is %s; waiting for: %s", view.run, view.state, view.waiting or "nothing")
                _settle_collector()
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(service.run)
                    nursery.start_soon(rooms.feed.run)
                    served = ServedRest(api, service.measures, trio.current_time)
                    nursery.start_soon(partial(serve_rest, served, listener, tls=tls, proxy=proxy))
                    nursery.start_soon(watch_loop_lag, service.measures.loop_lag, trio.current_time)
                    nursery.start_soon(_write_status, config, service, transport, nat, url)
                    if no_commands:
                        nursery.start_soon(_let_commands_in, local, no_commands)
    finally:
        listener.close()


def _settle_collector() -> None:
    """Libraries and the ledger's contents stay: they need not be looked at again. And what connections hold is alive:
    with 1,000 of them, looking through it as often as Python does by itself took two fifths of the time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECTIONS)


async def _open_when_there(config: CoordinatorConfig, password: str | None) -> Ledger:
    """The ledger, as soon as its server answers: who starts first after a power cut is chance.

    Another coordinator that has it may be ourselves before a `kill -9`: the server takes up to half a minute to see it.
    """
    told = ""
    patience = trio.current_time() + IN_USE_SECONDS
    while True:
        try:
            return open_ledger(config.ledger_url, password=password, exclusive=True, clock=trio.current_time)
        except DatabaseAway as error:
            if IN_USE in str(error) and trio.current_time() > patience:
                raise
            if str(error) != told:
                log.warning("waiting for the database: %s", error)
            told = str(error)
            status = {"pid": os.getpid(), "state": "starting", "waiting_for": told}
            write_status(config.state_dir / STATUS_FILE, status)
            await trio.sleep(DATABASE_SECONDS)


async def _let_commands_in(local: LocalToken, why: str) -> None:
    """On a full disk everything else is served; commands of this machine come in once their token can be written."""
    log.warning("%s; commands on this machine are let in when there is room", why)
    while why:
        await trio.sleep(DISK_SECONDS)
        why = local.write()


async def _write_status(
    config: CoordinatorConfig, service: CoordinatorService, transport: Libp2pTransport, nat: NatCoordinator, rest: str
) -> None:
    while True:
        run = service.run_view(config.run.name)
        pool = service.pool_view()
        status = {
            "pid": os.getpid(),
            "peer": pool.coordinator,
            "addresses": pool.addresses,
            "rest": rest,
            "run": run.run,
            "state": run.state,
            "version": run.version,
            "waiting_for": pool.trouble or run.waiting,
            "runs": service.run_states,
            "pool": pool.model_dump(mode="json"),
            "network": transport.view().model_dump(mode="json"),
            "relay": asdict(nat.view()),
        }
        write_status(config.state_dir / STATUS_FILE, status)
        await trio.sleep(STATUS_SECONDS)
