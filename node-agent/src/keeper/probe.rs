//! `keeper status`: how the keeper of this container is, for the kubelet's probes and for people.
//!
//! While one keeper takes over from another, both share the directory of `keeper.sock`, and
//! whoever owns that path is not necessarily this container's. So each keeper answers probes on
//! an abstract socket too, which is told apart by the mount namespace: that is a container's own,
//! also where it shares the host's network and processes.

use std::{
    fs,
    hash::{DefaultHasher, Hash, Hasher},
    os::unix::ffi::OsStrExt,
    path::Path,
    process::ExitCode,
    time::Duration,
};

use anyhow::Context;
use rustix::net::SocketAddrUnix;
use tokio::{
    sync::watch,
    time::{Instant, sleep, timeout},
};
use tracing::warn;

use crate::{
    args::State,
    keeper_protocol::{
        Answer, Ask, FrameError, Keeper, Outcome, Phase, Reason, Refusal, Reply, Request, Role, Socket,
        Status,
    },
    place::{Listener, Place, is_trusted},
};

/// How long a keeper that holds may be silent before it counts as stuck.
const STALE: Duration = Duration::from_secs(30);

/// What this keeper is at, and when it last said so.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pulse {
    phase: Phase,
    at: Instant,
}

impl Pulse {
    /// At this phase now.
    pub(crate) fn now(phase: Phase) -> Self {
        Self { phase, at: Instant::now() }
    }

    fn phase(self) -> Phase {
        if self.phase == Phase::Holding && self.at.elapsed() > STALE { Phase::Stuck } else { self.phase }
    }
}

fn address(directory: &Path) -> anyhow::Result<SocketAddrUnix> {
    let namespace = fs::read_link("/proc/self/ns/mnt").context("find the mount namespace")?;
    let mut hash = DefaultHasher::new();
    (namespace.as_os_str().as_bytes(), directory.as_os_str().as_bytes()).hash(&mut hash);
    let name = format!("highwater-keeper/{:016x}", hash.finish());
    Ok(SocketAddrUnix::new_abstract_name(name.as_bytes())?)
}

/// Answers probes for ever.
pub(crate) async fn serve(state: State, pulse: watch::Receiver<Pulse>) -> anyhow::Result<()> {
    let address = address(&state.state_dir)?;
    let mut told = false;
    let listener = loop {
        match Listener::bind(&address) {
            Ok(listener) => break listener,
            Err(error) => {
                if !std::mem::replace(&mut told, true) {
                    warn!(%error, "cannot answer probes: another keeper of this container does");
                }
                sleep(Duration::from_secs(2)).await;
            }
        }
    };
    loop {
        match listener.accept().await {
            Ok(socket) => {
                let pulse = pulse.clone();
                tokio::spawn(async move { timeout(Duration::from_secs(2), answer(&socket, &pulse)).await });
            }
            Err(_) => sleep(Duration::from_millis(200)).await,
        }
    }
}

async fn answer(socket: &Socket, pulse: &watch::Receiver<Pulse>) -> Result<(), FrameError> {
    if !is_trusted(socket.peer()?.0) {
        return Ok(());
    }
    loop {
        let Request { id, ask } = socket.receive().await?.read()?;
        let result = match ask {
            Ask::Hello { .. } => Outcome::Ok(Answer::Done {}),
            Ask::Status {} => Outcome::Ok(Answer::Status(Status {
                version: env!("CARGO_PKG_VERSION").to_owned(),
                phase: pulse.borrow().phase(),
                ..Status::default()
            })),
            _ => Outcome::Error(Refusal::new(Reason::NotAllowed, "this socket answers probes only")),
        };
        socket.send(&Reply { id, result }, &[]).await?;
    }
}

/// Prints the status as JSON. Fails unless the keeper of this container holds everything, or has
/// handed everything over.
pub(crate) async fn ask(state: &State) -> anyhow::Result<ExitCode> {
    let socket =
        Socket::connect_to(&address(&state.state_dir)?).context("no keeper runs in this container")?;
    let mut status = Keeper::over(socket, Role::Probe).await?.status().await?;
    let phase = status.phase;
    if phase == Phase::Holding {
        let path = Place::new(&state.state_dir)?.socket();
        // The path is what agents use: a keeper that holds and is not found there is of no use.
        status = Keeper::connect_as(&path, Role::Probe).await?.status().await?;
    }
    println!("{}", serde_json::to_string(&status)?);
    let well = matches!(phase, Phase::Holding | Phase::StandingBy);
    Ok(if well { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
