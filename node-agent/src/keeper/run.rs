//! The keeper's life: take over, hold, stand by, and so on until it is ended.

use std::{pin::pin, time::Duration};

use anyhow::Context;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::{
    signal::unix::{Signal, SignalKind, signal},
    sync::watch,
    time::sleep,
};
use tracing::{info, warn};

use crate::{
    args::Serve,
    holder::{self, End},
    keeper_protocol::Phase,
    place::Place,
    probe::{self, Pulse},
    succeed,
};

/// Between two attempts to take over.
const PAUSE: Duration = Duration::from_secs(1);

/// Runs until SIGTERM or SIGINT.
pub(crate) async fn run(args: Serve) -> anyhow::Result<()> {
    raise_descriptor_limit();
    let mut ends = Ends { term: signal(SignalKind::terminate())?, int: signal(SignalKind::interrupt())? };
    let directory = &args.state.state_dir;
    let place =
        Place::new(directory).with_context(|| format!("use the directory {}", directory.display()))?;
    let (pulse, probed) = watch::channel(Pulse::now(Phase::Starting));
    let state = args.state.clone();
    tokio::spawn(async move {
        if let Err(error) = probe::serve(state, probed).await {
            warn!(error = format!("{error:#}"), "probes are not answered");
        }
    });
    // One that handed over does not ask for it back.
    let mut new = true;
    loop {
        pulse.send_replace(Pulse::now(if new { Phase::Starting } else { Phase::StandingBy }));
        let inherited = tokio::select! {
            inherited = succeed::inherit(&place, new) => inherited,
            () = ends.wait() => return Ok(()),
        };
        let inheritance = match inherited {
            Ok(inheritance) => inheritance,
            Err(error) => {
                warn!(error = format!("{error:#}"), "cannot take over; trying again");
                tokio::select! {
                    () = sleep(PAUSE) => continue,
                    () = ends.wait() => return Ok(()),
                }
            }
        };
        let ended = holder::hold(&args, &place, inheritance, &pulse, pin!(ends.wait())).await;
        match ended {
            Ok(End::HandedOver) => {
                info!("another keeper holds everything now: standing by");
                new = false;
            }
            Ok(End::Terminated) => return Ok(()),
            Err(error) => {
                warn!(error = format!("{error:#}"), "cannot serve; trying again");
                tokio::select! {
                    () = sleep(PAUSE) => {}
                    () = ends.wait() => return Ok(()),
                }
            }
        }
    }
}

/// The signals that end the keeper.
struct Ends {
    term: Signal,
    int: Signal,
}

impl Ends {
    async fn wait(&mut self) {
        tokio::select! {
            _ = self.term.recv() => {}
            _ = self.int.recv() => {}
        }
    }
}

/// Each chunk is a descriptor, and the kernel counts those on their way against the same limit.
fn raise_descriptor_limit() {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit { current: limit.maximum, maximum: limit.maximum };
    if let Err(error) = setrlimit(Resource::Nofile, raised) {
        warn!(%error, "cannot raise the limit of open descriptors");
    }
}
