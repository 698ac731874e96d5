//! Wiring: what runs, and in which order it starts and stops.

use std::{
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use anyhow::Context as _;
use kube::{Client, Config};
use tokio::{
    signal::unix::{SignalKind, signal},
    task::JoinSet,
};
use tokio_util::sync::CancellationToken;
use tracing::info;

use crate::{
    args::Settings,
    context::{Context, Ends},
    events,
    http::{self, Ready},
    incident_controller, leader, node_controller, policy_controller, watch as watches,
};

/// How long work that was begun may take after SIGTERM.
const DRAIN: Duration = Duration::from_secs(15);

/// Runs until SIGTERM. If any part ends before, so does the process: it is started anew rather
/// than left limping.
pub(crate) async fn run(settings: Settings) -> anyhow::Result<()> {
    let Settings { namespace, identity, listen } = settings;
    info!(version = env!("CARGO_PKG_VERSION"), namespace, identity, "operator starts");
    let client = client().await?;
    let (ctx, Ends { writers, events: to_publish, leads, learnt }) =
        Context::new(client.clone(), namespace.clone())?;
    let ctx = Arc::new(ctx);
    let metrics = ctx.metrics.clone();

    let mut terminated = signal(SignalKind::terminate())?;
    let mut interrupted = signal(SignalKind::interrupt())?;
    let ready = Ready::default();
    let mut parts: JoinSet<anyhow::Result<()>> = JoinSet::new();
    parts.spawn(http::serve(listen, metrics.clone(), Arc::clone(&ready)));
    parts.spawn(events::publish(client, identity.clone(), metrics, to_publish));
    watches::spawn(&mut parts, &ctx, writers);

    let stop = CancellationToken::new();
    let released = CancellationToken::new();
    let mut work: JoinSet<()> = JoinSet::new();
    let campaign = leader::campaign(lease_client().await?, namespace, identity, leads, released.clone());
    let starting = Arc::clone(&ctx);
    tokio::select! {
        _ = terminated.recv() => return Ok(()),
        _ = interrupted.recv() => return Ok(()),
        Some(ended) = parts.join_next() => return ended?.context("a part of the operator ended"),
        stores = async move { starting.stores.ready().await } => stores?,
    }
    info!("everything was heard once");
    // Plans and budgets must be known before anything is decided.
    policy_controller::learn(&ctx, &learnt);
    ready.store(true, Ordering::Relaxed);
    let mut campaign = tokio::spawn(campaign);
    work.spawn(policy_controller::run(Arc::clone(&ctx), learnt, stop.clone()));
    work.spawn(incident_controller::run(Arc::clone(&ctx), stop.clone()));
    work.spawn(incident_controller::collect_finished(Arc::clone(&ctx), stop.clone()));
    work.spawn(node_controller::run(Arc::clone(&ctx), stop.clone()));
    work.spawn(follow_leadership(Arc::clone(&ctx), stop.clone()));

    let outcome = tokio::select! {
        _ = terminated.recv() => Ok(()),
        _ = interrupted.recv() => Ok(()),
        Some(ended) = parts.join_next() => ended?.and_then(|()| anyhow::bail!("a part of the operator ended")),
        ended = &mut campaign => return ended?.and_then(|()| anyhow::bail!("the leader election ended")),
        Some(ended) = work.join_next() => ended.map_err(Into::into).and_then(|()| anyhow::bail!("a controller ended")),
    };
    info!("stopping: finishing what was begun");
    stop.cancel();
    let drained = tokio::time::timeout(DRAIN, async { while work.join_next().await.is_some() {} }).await;
    released.cancel();
    campaign.await??;
    drained.context("some work did not end in time")?;
    outcome
}

/// Looks at everything when leadership is won, and forgets what only a leader knows when it is
/// lost.
async fn follow_leadership(ctx: Arc<Context>, stop: CancellationToken) {
    let mut leader = ctx.leader.clone();
    loop {
        let leads = tokio::select! { () = stop.cancelled() => return, leads = leader.changed() => leads };
        ctx.metrics.leader.set(i64::from(leads));
        ctx.claims.clear();
        ctx.device_taints.clear().await;
        incident_controller::show_halt(&ctx);
        incident_controller::show_tickets(&ctx);
        if leads {
            ctx.wake_all();
        }
    }
}

/// The client for everything but the lease. It tries nothing again by itself: the queues do, each
/// key in its own time.
pub(crate) async fn client() -> anyhow::Result<Client> {
    Ok(Client::try_from(config().await?)?)
}

/// The client for the lease, whose calls fail before the lease ends.
async fn lease_client() -> anyhow::Result<Client> {
    let mut config = config().await?;
    config.connect_timeout = Some(leader::CALL);
    config.read_timeout = Some(leader::CALL);
    config.write_timeout = Some(leader::CALL);
    Ok(Client::try_from(config)?)
}

async fn config() -> anyhow::Result<Config> {
    let mut config = Config::infer().await.context("no way to reach the API server")?;
    config.default_retry = false;
    config.connect_timeout = Some(Duration::from_secs(5));
    Ok(config)
}
