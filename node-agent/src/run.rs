//! Wires the agent together and runs its loop until it is told to end.

use std::{
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context, bail};
use highwater_crds::StrengthReason;
use jiff::Timestamp;
use kube::{Client, Config};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::{
    signal::unix::{SignalKind, signal},
    sync::{Notify, mpsc, watch},
    task::{JoinHandle, JoinSet},
    time::{MissedTickBehavior, interval, timeout},
};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::{
    act::{hook, restart},
    args::Args,
    engine::{Engine, Order, Setup},
    evidence, fares,
    framework::{self, Scraped, Target},
    guard::{self, Guards, News},
    host::{self, Host, Reading, Surveyed, Want},
    http::{self, Ask},
    leaks,
    limits::{Cgroups, Task},
    link::{self, Heard},
    metrics::grant_durations,
    pod_resources::{self, Snapshot},
    publish::Publisher,
    sampler::{Report, Sampler, Settings},
    signal::Signals,
    watch as api,
    world::WorldChange,
};

/// Reports that may wait. A round of samples that finds no room is dropped.
const REPORTS: usize = 64;
/// Time between two looks at what no event tells.
const TICK: Duration = Duration::from_millis(250);

/// How long what is to be kept may take to be written when the agent ends.
const KEEP_WITHIN: Duration = Duration::from_secs(5);

/// Runs the agent.
///
/// # Errors
/// Fails when the API server's address is not known, when an address cannot be bound, or when a
/// part that ought to run for ever ended.
#[allow(clippy::too_many_lines, reason = "the wiring")]
pub(crate) async fn run(args: Args) -> anyhow::Result<()> {
    let Args {
        node_name,
        namespace,
        sample_interval_milliseconds,
        driver_library,
        pod_resources_socket,
        kubelet_root,
        state_dir,
        listen,
        proc_root,
        keeper_socket,
        kernel_limits,
        cgroup_root,
        host_memory_root,
    } = args;
    info!(node = node_name, version = env!("CARGO_PKG_VERSION"), "the agent starts");
    let config = Config::infer().await.context("finding the API server: run in a pod, or set KUBECONFIG")?;
    let client = Client::try_from(config).context("making a client of the API server")?;

    let (done_send, mut done) = mpsc::unbounded_channel();
    let publisher = Publisher::new(client.clone(), &node_name, done_send);
    let mut tasks = JoinSet::new();
    raise_descriptors();
    let has_keeper = keeper_socket.is_some();
    let grants = grant_durations(&node_name).context("making metrics")?;
    let guarding = guard::Settings {
        kubelet_root: kubelet_root.clone(),
        proc_root: proc_root.clone(),
        grants: grants.clone(),
    };
    let host_memory = host::is_unified(&host_memory_root);
    let host = Arc::new(Host::new(&host_memory_root, proc_root.clone()));
    let Lines { mut news, mut heard, mut limit_tasks, mut acts, keeping, order } =
        lines(guarding, keeper_socket, host, &mut tasks)?;

    let signals = Signals::new(kubelet_root);
    let clock = || (Instant::now(), Timestamp::now());
    let submit = move |job| publisher.submit(job);
    let setup = Setup {
        node: node_name.clone(),
        release_namespace: namespace,
        state_dir,
        proc_root: proc_root.clone(),
        keeper: has_keeper,
        cgroups: if !kernel_limits {
            Err(StrengthReason::KernelLimitsDisabled)
        } else if host::is_unified(&cgroup_root) {
            Ok(())
        } else {
            Err(StrengthReason::NoCgroupV2)
        },
        host_memory,
        grants,
    };
    let mut engine = Engine::new(clock, setup, signals, submit, order).context("registering metrics")?;

    let (changes_send, mut changes) = mpsc::unbounded_channel();
    api::start(&client, &node_name, &changes_send, &mut tasks);

    let cancelled = CancellationToken::new();
    let pods_changed = Arc::new(Notify::new());
    let (resources_send, mut resources) = watch::channel(Snapshot::default());
    let asking = pod_resources::run(
        pod_resources_socket,
        Arc::clone(&pods_changed),
        resources_send,
        cancelled.clone(),
    );
    tasks.spawn(async {
        asking.await;
        "pod resources"
    });

    let (asks_send, mut asks) = mpsc::channel(16);
    let server = http::serve(listen, asks_send);
    let mut server = std::pin::pin!(server);

    let (reports_send, mut reports) = mpsc::channel(REPORTS);
    let settings = Settings {
        interval: Duration::from_millis(sample_interval_milliseconds.into()),
        library: driver_library,
        proc_root: proc_root.clone(),
    };
    let (dropped_send, mut dropped) = mpsc::channel(REPORTS);
    let sampler = Sampler::start(settings, engine.stands_down(), move |report| {
        deliver(&reports_send, &dropped_send, report);
    });

    let mut terminate = signal(SignalKind::terminate()).context("waiting for SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("waiting for SIGINT")?;
    let mut looking = JoinSet::new();
    let mut faring = JoinSet::new();
    let mut finding = JoinSet::new();
    let cgroups = Arc::new(Cgroups::new(cgroup_root));
    let mut tick = interval(TICK);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        if engine.hurries() {
            sampler.soon();
        }
        if looking.is_empty() && engine.is_alarmed() {
            let proc_root = proc_root.clone();
            looking.spawn_blocking(move || evidence::look(&proc_root));
        }
        let deadline = engine.deadline().map(|in_| tokio::time::Instant::now() + in_);
        tokio::select! {
            biased;
            _ = terminate.recv() => break,
            _ = interrupt.recv() => break,
            // Before the samples: who shows there has said so before.
            Some(news) = news.recv() => engine.guards(news),
            Some(heard) = heard.recv() => engine.keeper(heard),
            () = at(deadline) => engine.due(),
            Some(report) = reports.recv() => engine.report(report),
            Some(answered) = acts.answered.recv() => engine.hooked(answered),
            Some(outcome) = acts.restarted.recv() => engine.restarted(outcome),
            Some(surveyed) = acts.surveyed.recv() => engine.surveyed(surveyed),
            Some(readings) = acts.readings.recv() => engine.host(readings),
            Some(scraped) = acts.scraped.recv() => engine.scraped(scraped),
            Some(done) = done.recv() => engine.done(done),
            Some(change) = changes.recv() => {
                if matches!(change, WorldChange::Pod(_)) {
                    pods_changed.notify_one();
                }
                engine.world(change);
                sampler.stand_down(engine.stands_down());
            }
            Ok(()) = resources.changed() => engine.resources(resources.borrow_and_update().clone()),
            Some(ask) = asks.recv() => answer(&engine, &resources, ask),
            Some(()) = dropped.recv() => engine.dropped(),
            _ = tick.tick() => {
                let (unresponsive, blocked) = sampler.watch();
                engine.tick(&unresponsive, blocked);
                sampler.stand_down(engine.stands_down());
                sampler.eager(engine.is_eager());
                if engine.asks_anew() {
                    renew(&acts.wants, engine.host_wants());
                    renew(&acts.targets, engine.framework_targets());
                }
                if looking.is_empty() && engine.seeks_evidence() {
                    let proc_root = proc_root.clone();
                    looking.spawn_blocking(move || evidence::look(&proc_root));
                }
                if faring.is_empty() && engine.asks_how_host_fares() {
                    let proc_root = proc_root.clone();
                    faring.spawn_blocking(move || fares::read(&proc_root));
                }
            }
            Some(Ok(users)) = looking.join_next() => engine.found(users),
            Some(Ok(reading)) = faring.join_next() => engine.fares(&reading),
            Some(task) = limit_tasks.recv() => {
                let cgroups = Arc::clone(&cgroups);
                finding.spawn_blocking(move || {
                    let found = cgroups.of(&task.pod);
                    (task, found)
                });
            }
            Some(Ok((task, cgroups))) = finding.join_next() => sampler.limit(task, cgroups),
            ended = tasks.join_next() => bail!("a part of the agent ended: {ended:?}"),
            end = &mut server => {
                end.with_context(|| format!("serving on {listen}"))?;
                bail!("the HTTP server ended");
            }
        }
    }
    info!("told to end");
    cancelled.cancel();
    sampler.stop();
    engine.close();
    // With the engine the last end of its lines goes: what was to be kept is written then.
    drop(engine);
    match timeout(KEEP_WITHIN, keeping).await {
        Ok(kept) => kept.context("keeping what was seen of leaks"),
        Err(_) => bail!("what was seen of leaks last is not kept: the disk does not answer"),
    }
}

/// What the loop hears of others than the API server, and how it gives them orders.
struct Lines<F> {
    /// The thread that serves guards.
    news: mpsc::UnboundedReceiver<News>,
    /// The keeper.
    heard: mpsc::UnboundedReceiver<Heard>,
    /// Limits that the driver is to be given.
    limit_tasks: mpsc::UnboundedReceiver<Task>,
    /// What came of acts.
    acts: Outcomes,
    /// Ends when all is written that was to be kept, once nobody gives orders any more.
    keeping: JoinHandle<()>,
    order: F,
}

/// What the loop hears of the tasks that do what takes time.
struct Outcomes {
    answered: mpsc::UnboundedReceiver<hook::Answered>,
    restarted: mpsc::UnboundedReceiver<restart::Outcome>,
    surveyed: mpsc::UnboundedReceiver<Surveyed>,
    readings: mpsc::UnboundedReceiver<Vec<Reading>>,
    /// Whose host memory is to be read.
    wants: watch::Sender<Arc<Vec<Want>>>,
    scraped: mpsc::UnboundedReceiver<Scraped>,
    /// Whose frameworks' numbers are to be read.
    targets: watch::Sender<Arc<Vec<Target>>>,
}

/// Tells a task what is wanted of it, where that differs.
fn renew<T: PartialEq>(told: &watch::Sender<Arc<Vec<T>>>, now: Vec<T>) {
    told.send_if_modified(|told| {
        let differs = **told != now;
        if differs {
            *told = Arc::new(now);
        }
        differs
    });
}

/// Starts the thread that serves guards, and the line to the keeper.
fn lines(
    guarding: guard::Settings,
    keeper_socket: Option<PathBuf>,
    host: Arc<Host>,
    tasks: &mut JoinSet<&'static str>,
) -> anyhow::Result<Lines<impl FnMut(Order) + 'static>> {
    let proc_root: Arc<std::path::Path> = guarding.proc_root.as_path().into();
    let (news_send, news) = mpsc::unbounded_channel();
    // The loop ended: so will the thread.
    let guards = Guards::start(guarding, move |news| drop(news_send.send(news)))
        .context("starting the thread that serves guards")?;
    let (heard_send, heard) = mpsc::unbounded_channel();
    let (keeper_send, keeper_orders) = mpsc::unbounded_channel();
    if let Some(socket) = keeper_socket {
        let line = link::run(socket, keeper_orders, heard_send);
        tasks.spawn(async {
            line.await;
            "the line to the keeper"
        });
    }
    let (limits_send, limit_tasks) = mpsc::unbounded_channel();
    let (calls_send, calls) = mpsc::unbounded_channel();
    let (answered_send, answered) = mpsc::unbounded_channel();
    tasks.spawn(async {
        hook::run(calls, answered_send).await;
        "hooks"
    });
    let (restarts_send, restarts) = mpsc::unbounded_channel();
    let (restarted_send, restarted) = mpsc::unbounded_channel();
    tasks.spawn(async {
        restart::run(proc_root, restarts, restarted_send).await;
        "restarts in place"
    });
    let (surveys_send, surveys) = mpsc::unbounded_channel();
    let (surveyed_send, surveyed) = mpsc::unbounded_channel();
    let (readings_send, readings) = mpsc::unbounded_channel();
    let (wants, wanted) = watch::channel(Arc::new(Vec::new()));
    tasks.spawn(async {
        host::run(host, wanted, surveys, readings_send, surveyed_send).await;
        "reading host memory"
    });
    let (scraped_send, scraped) = mpsc::unbounded_channel();
    let (targets, asked) = watch::channel(Arc::new(Vec::new()));
    tasks.spawn(async {
        framework::run(asked, scraped_send).await;
        "reading frameworks' numbers"
    });
    let (keep_send, keep) = mpsc::unbounded_channel();
    let keeping = tokio::spawn(leaks::keep(keep));
    let order = move |order| match order {
        Order::Guard(order) => guards.order(order),
        // Without a keeper nobody listens.
        Order::Keeper(order) => drop(keeper_send.send(order)),
        Order::Limit(task) => drop(limits_send.send(task)),
        Order::Hook(call) => drop(calls_send.send(call)),
        Order::Restart(order) => drop(restarts_send.send(order)),
        Order::Survey(survey) => drop(surveys_send.send(survey)),
        Order::Keep(seen) => drop(keep_send.send(seen)),
    };
    let acts = Outcomes { answered, restarted, surveyed, readings, wants, scraped, targets };
    Ok(Lines { news, heard, limit_tasks, acts, keeping, order })
}

/// Waits until then; for ever if that is never.
async fn at(deadline: Option<tokio::time::Instant>) {
    match deadline {
        Some(deadline) => tokio::time::sleep_until(deadline).await,
        None => std::future::pending().await,
    }
}

/// Lets the agent have as many descriptors as it may: a guarded process takes two.
fn raise_descriptors() {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit { current: limit.maximum, maximum: limit.maximum };
    if let Err(error) = setrlimit(Resource::Nofile, raised) {
        warn!(%error, current = limit.current, "the number of guarded processes is bounded by that of descriptors");
    }
}

/// Hands a report to the loop. Never blocks: a round of samples for which there is no room is
/// worth nothing by the time that there is.
fn deliver(reports: &mpsc::Sender<Report>, dropped: &mpsc::Sender<()>, report: Report) {
    match report {
        Report::Pass(_) => {
            if reports.try_send(report).is_err() {
                // Counted as far as there is room to count.
                let _ = dropped.try_send(());
            }
        }
        // The loop ended: so will this thread.
        report => drop(reports.blocking_send(report)),
    }
}

fn answer(engine: &Engine, resources: &watch::Receiver<Snapshot>, ask: Ask) {
    // Whoever asked may have gone.
    match ask {
        Ask::Metrics(to) => drop(to.send(engine.render(resources.borrow().at))),
        Ask::Health(to) => drop(to.send(engine.health())),
        Ask::Ready(to) => drop(to.send(engine.ready())),
    }
}
