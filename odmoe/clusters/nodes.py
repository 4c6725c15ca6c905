"""Makes the nodes of a cluster from its settings, for every kind of cluster."""

from __future__ import annotations

import random
import secrets
from collections.abc import Callable
from pathlib import Path

from checkpoint import kv
from checkpoint.expert import ExpertArithmetic
from checkpoint.family import config_from_dict, parse_dtype
from checkpoint.kernels import linear_of
from checkpoint.mtp_head import find_in_store
from checkpoint.sizes.message_limits import message_limits
from checkpoint.store import ExpertStore
from main_node.admission import Sharing
from main_node.checks.arbiter import Arbiter
from main_node.checks.audits import AUTO_SHARE, Audits
from main_node.checks.verification import Verification
from main_node.drafting import DraftSource
from main_node.engine.engine import Engine, Waits
from main_node.engine.pace import MainPace
from main_node.engine.peers import Connect
from main_node.kept_prompts import KVKeeping
from main_node.node import MainNode
from main_node.shadow_start import ShadowStart
from main_node.shape import model_shape
from main_node.sources import Computing, PredictionSources, TextRules
from odmoe.clusters.configuration import Configuration, Resources, find_token_predictor
from odmoe.clusters.devices import device_of, shadow_devices
from odmoe.clusters.memory.budget import rows_at_once, rows_travel
from odmoe.clusters.timed_streams import MainStreamEnd, TimedChannel, TimedHandler, TimedNode
from odmoe.json_schema import make_guides
from odmoe.settings.settings import Settings
from odmoe.text import KeptTokenizer, end_token, make_stopper
from scheduler.alignment import LATE
from scheduler.build import make_core
from scheduler.emulation.clock import Emulation
from scheduler.emulation.expected_predictions import ExpectedPredictions
from scheduler.eventlog.recording import Recorder
from scheduler.policies.precision import FULL
from scheduler.timing.links import MainLinks
from scheduler.timing.profile import find_profile
from shadow_node.pace import ShadowPace
from wire.base import Node
from wire.lent_threads import LentThreads
from wire.messages import PROTOCOL_VERSION, Hello
from worker_node.form_choice import FormChoice, choose_forms, emulated_costs, settle_forms
from worker_node.loaders.base import Loader
from worker_node.loaders.make import make_loader
from worker_node.node import Worker
from worker_node.worker_threads import WorkerThreads


def emulation_of(settings: Settings) -> Emulation | None:
    """The emulated clock of --profile, one for all nodes of a process. Raises ConfigError for an unknown profile."""
    if settings.profile is None:
        return None
    return Emulation(find_profile(settings.profile), duplex=settings.system_config.prefill == "ahead")


def with_timing(node: Node, emulation: Emulation | None) -> Node:
    """The node, with its end of each stream timed by the profile. Without emulation, the node itself."""
    return node if emulation is None else TimedNode(node, emulation)


def timed_connect(emulation: Emulation | None, engine: Engine) -> Callable[[Connect], Connect]:
    """As `with_timing`, for the main node's end of its streams, which all share its link: wraps a `Connect`."""
    if emulation is None:
        return lambda to: to
    owed = emulation.agenda.expected = ExpectedPredictions(emulation.profile)
    way = MainStreamEnd(MainLinks(emulation.profile, emulation.duplex), owed)

    def connect_timed(to: Connect) -> Connect:
        return lambda handler: TimedChannel(to(TimedHandler(handler, way, emulation)), way, emulation)

    return connect_timed


def make_engine(
    settings: Settings,
    store: ExpertStore,
    configuration: Configuration,
    emulation: Emulation | None = None,
    recorder: Recorder | None = None,
) -> Engine:
    """The scheduler, and the engine around it. Raises ConfigError."""
    if settings.has_shadow and settings.align_kv:
        kv.kinds(config_from_dict(store.manifest.config))
    manifest, traced = store.manifest, settings.trace is not None
    hello = Hello(PROTOCOL_VERSION, manifest.model_digest, manifest.dtype, "main", traced, secrets.token_hex(16))
    pace = MainPace(emulation) if emulation else None
    engine = Engine(
        make_core(configuration.core),
        hello,
        Waits(worker_s=settings.worker_wait),
        configuration.core.system.departure,
        pace,
        Verification(_audits(settings, emulation), Arbiter(store, linear_of(settings.kernel))),
        message_limits(store),
    )
    if recorder is not None:
        engine.add_observer(recorder)
    return engine


def _audits(settings: Settings, emulation: Emulation | None) -> Audits | None:
    """The same ones each time in emulated time, so that runs can be repeated."""
    auto = settings.audit == "auto"
    alone = settings.workers_given and settings.workers == 1
    share = (0.0 if alone else AUTO_SHARE) if settings.audit == "auto" else settings.audit
    return Audits(share, auto, random.Random(0 if emulation else None)) if share else None


def make_worker(
    number: int,
    settings: Settings,
    store: ExpertStore,
    arithmetic: ExpertArithmetic,
    emulation: Emulation | None,
    resources: Resources,
    lent: LentThreads | None = None,
) -> Node:
    """`lent`: the main model's threads, where they are in this process. Raises LaunchError if the loader has too little
    memory."""
    lent = lent if emulation is None else None  # emulated time is each thread's own
    device = device_of(settings, "worker")
    if device.type != "cpu" and (lent is None or device != device_of(settings, "main")):
        lent = None  # a main node on another device gives its threads to workers on the processor alone
    name = settings.loader_used if emulation is None else "emulated"

    def loader_of(forms: tuple[str, ...], host_slots: int | None) -> Loader:
        return make_loader(name, store, emulation, settings.loader_used, forms, str(device), host_slots)

    found = FormChoice(resources.forms, resources.slots)
    if any(resources.forms) and settings.smaller_forms == "auto":
        if emulation is None:
            tiered = resources.host_slots is not None  # then every form comes from disk here, past host memory
            measured = loader_of((FULL, *resources.forms), 0) if tiered else loader_of(resources.forms, None)
            found = choose_forms(store, arithmetic, measured, found, resources.full_slots, settings.threads_a_node)
        else:
            found = settle_forms(found, resources.full_slots, emulated_costs(emulation.profile, store, resources.forms))
    loader = loader_of(found.forms, resources.full_host_slots if found.forms == (FULL,) else resources.host_slots)
    threads = WorkerThreads(lent, settings.threads_a_node)
    worker = Worker(f"worker {number}", store, arithmetic, loader, found, threads, settings.check_loads)
    return with_timing(worker, emulation)


def make_shadow(settings: Settings, store: ExpertStore, emulation: Emulation | None) -> Node:
    """Quantises the whole model, which takes as long as reading it."""
    from shadow_node.model import ShadowModel
    from shadow_node.node import Shadow

    manifest, pace = store.manifest, ShadowPace(emulation) if emulation else None
    model = ShadowModel(store, settings.shadow, _shadow_device(settings))
    kept = model.kept_prompts(settings.kept_bytes) if emulation is None else None  # there a pass takes its own time
    shadow = Shadow("shadow", model, manifest.model_digest, manifest.dtype, pace, kept)
    return with_timing(shadow, emulation)


def make_shadow_part(settings: Settings, store: ExpertStore, number: int, rooms: tuple[int, ...]) -> Node:
    """A process of a shadow that `rooms` bytes of several share; that with number 0 is the shadow node."""
    from shadow_node.node import Shadow
    from shadow_node.stages.division import Part
    from shadow_node.stages.first import FirstStage
    from shadow_node.stages.later import LaterStage
    from shadow_node.stages.node import Stage

    device, part = _shadow_device(settings), Part(number, rooms)
    belongs = store.manifest.model_digest, store.manifest.dtype
    if number:
        return Stage(f"part {number} of the shadow", LaterStage(store, settings.shadow, device, part=part), *belongs)
    model = FirstStage(store, settings.shadow, device, part)
    shadow = Shadow("shadow", model, *belongs)
    model.on_part_lost = shadow.on_part_lost
    return shadow


def _shadow_device(settings: Settings) -> str:
    return ",".join(map(str, shadow_devices(settings)))


def _keeping(settings: Settings, store: ExpertStore) -> KVKeeping | None:
    """What is kept of earlier prompts' KV caches."""
    if not settings.kept_bytes:
        return None
    rows = settings.mini_batch or (0 if rows_travel(settings) else rows_at_once(store, model_shape(store)))
    directory = None if settings.kv_disk is None else Path(settings.kv_disk).expanduser()
    workers = f"{settings.device_of('worker')}, smaller forms {settings.smaller_forms}"
    computed_by = f"{settings.system_config}, workers {workers}"
    return KVKeeping(settings.kept_bytes, directory, settings.kv_disk_size, rows, computed_by)


def _weighs_predictions(settings: Settings, engine: Engine) -> bool:
    """Whether they are tried: not if tokens may depend on what is in slots, or the predictor learns as it predicts."""
    strategy = engine.core.strategy
    as_named = settings.predictions == "always" or settings.record is not None or engine.pace.profile_name is not None
    foresees, learns = strategy.predictor.foresight is not None, settings.predictor_learning_rate > 0
    return foresees and strategy.exact and not learns and not as_named


def make_main(settings: Settings, store: ExpertStore, engine: Engine, shadow: ShadowStart | None) -> MainNode:
    """Raises ConfigError if --ctx-size exceeds the model's limit, or no head is there to draft."""
    if settings.drafts_by_head:
        find_in_store(store)
    device = device_of(settings, "main")
    dtype = parse_dtype(store.manifest.dtype)
    tokenizer = KeptTokenizer(store.dense)
    token_file = find_token_predictor(settings, store)
    linear = linear_of(settings.kernel)
    sharing = Sharing(
        settings.parallel,
        settings.queue,
        settings.prefill_chunk,
        settings.batch_dense,
        settings.ctx_size,
        settings.launch_s,
        _keeping(settings, store),
    )
    drafts = None
    if settings.has_drafts:
        late = settings.system_config.departure == LATE
        drafts = DraftSource(settings.draft, late, settings.draft_from)
    engine.prediction_trial.weighs = _weighs_predictions(settings, engine)
    return MainNode(
        store,
        engine,
        Computing(dtype, device, linear),
        shadow,
        sharing,
        TextRules(make_stopper(store.dense, tokenizer), make_guides(store.dense, tokenizer), end_token(tokenizer)),
        PredictionSources(drafts, token_file, settings.predictor_learning_rate),
    )
