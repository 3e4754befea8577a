"""A worker process: one engine, kept warm, that serves the lane its controller names."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading
import time
from multiprocessing.connection import Connection

import redis
from setproctitle import setproctitle

from tokenyard.connection import BLOCK_MARGIN_S, open_connection
from tokenyard.keys import Keys
from tokenyard.scripts import Scripts
from tokenyard.settings import WorkerSettings
from worker.engines import Engine
from worker.engines.loading import load_engine, prepare_environment
from worker.loop import Delivery, EngineLoop, LeaseLost, Stale, Term
from worker.messages import Beat, Failed, Ready, ToController, ToProcess
from worker.publisher import Publisher
from worker.reader import LaneReader

log = logging.getLogger("tokenyard.worker.process")

BEAT_S = 1.0


def main(settings: WorkerSettings, slot: int, pipe: Connection) -> None:
    """Entry point of the spawned process; it imports no torch before the device is chosen."""
    # The controller decides when to stop; a Ctrl-C in the terminal reaches it too.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    setproctitle(f"tokenyard worker {settings.yard} slot {slot}")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    threading.excepthook = _end_process
    prepare_environment(settings, slot)
    try:
        WorkerProcess(settings, slot, pipe).run()
    except Exception as fault:
        log.exception("worker process ends")
        pipe.send(Failed(f"{type(fault).__name__}: {fault}"))
        raise SystemExit(1) from None


def _end_process(fault: threading.ExceptHookArgs) -> None:
    """A reader or publisher that ended by a fault would leave its lane unserved for ever."""
    log.critical("%s ends the process", fault.thread, exc_info=fault.exc_value)
    os._exit(1)


class WorkerProcess:
    """Wires engine, loop and pipe together."""

    def __init__(self, settings: WorkerSettings, slot: int, pipe: Connection) -> None:
        self._settings = settings
        self._slot = slot
        self._pipe = pipe
        self._pipe_lock = threading.Lock()
        self._keys = Keys(settings.yard)

    def run(self) -> None:
        """Load the engine, then serve until told to stop."""
        threading.Thread(target=self._die_with_controller, name="orphan", daemon=True).start()
        engine = load_engine(self._settings)
        self._loop = EngineLoop(engine, self._term(engine), self._tell)
        self._tell(Ready(engine.info))
        threading.Thread(target=self._listen, name="pipe", daemon=True).start()
        threading.Thread(target=self._beat, name="beat", daemon=True).start()
        self._loop.run()
        engine.close()
        log.info("slot %d stops", self._slot)

    def _term(self, engine: Engine) -> _TermFactory:
        return _TermFactory(self._settings, self._keys, engine)

    def _tell(self, message: ToController) -> None:
        with self._pipe_lock:
            self._pipe.send(message)

    def _listen(self) -> None:
        """Commands from the controller, straight into the loop's inbox."""
        while True:
            try:
                command: ToProcess = self._pipe.recv()
            except (EOFError, OSError):  # the controller has died; `_die_with_controller` sees it
                return
            self._loop.inbox.put(command)

    def _beat(self) -> None:
        """Tell once a second how far the loop has come, so that a hang is seen."""
        while True:
            time.sleep(BEAT_S)
            try:
                self._tell(Beat(self._loop.progress, self._loop.unfinished))
            except OSError:
                return

    def _die_with_controller(self) -> None:
        """Without a controller nobody renews the lease: end at once, the lane will be rescued."""
        # Not `os.getppid`: a controller that died before this line would never be missed.
        controller = multiprocessing.parent_process()
        if controller is not None:
            controller.join()
            os._exit(1)


class _TermFactory:
    """Makes the threads of one incarnation, each with a connection of its own."""

    def __init__(self, settings: WorkerSettings, keys: Keys, engine: Engine) -> None:
        self._settings = settings
        self._keys = keys
        self._engine = engine

    def __call__(self, worker: str, loop: EngineLoop) -> Term:
        settings = self._settings
        scripts = Scripts(self._connect(), self._keys, reply_maxlen=settings.reply_maxlen)
        publisher = Publisher(
            scripts,
            worker,
            self._engine.info,
            on_stale=lambda entry: loop.inbox.put(Stale(worker, entry)),
            on_lost=lambda: loop.inbox.put(LeaseLost(worker)),
        )
        reader = LaneReader(
            self._connect(),
            self._keys,
            worker,
            lambda assignment: loop.inbox.put(Delivery(worker, assignment)),
            lambda entry: loop.inbox.put(Stale(worker, entry)),
            settings.block_ms,
        )
        return Term(worker, reader, publisher, self._clock_ms())

    def _clock_ms(self) -> float:
        """How far the server's clock, which deadlines go by, is ahead of ours."""
        try:
            with self._connect() as connection:
                now: tuple[int, int] = connection.time()
        except redis.RedisError as fault:
            log.warning("the server's clock is not known, ours is taken: %s", fault)
            return 0.0
        return now[0] * 1000 + now[1] / 1000 - time.time() * 1000

    def _connect(self) -> redis.Redis:
        """The callers try again themselves: they know when to give up."""
        timeout_s = self._settings.block_ms / 1000 + BLOCK_MARGIN_S
        return open_connection(self._settings.redis_url, timeout_s=timeout_s, retries=0)
