//! The keeper's side of the worker that moves memory.

use std::{io, path::Path, process::Stdio, time::Duration};

use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use serde::{Deserialize, Serialize};
use tokio::{process::Command, sync::mpsc, task::JoinHandle, time::timeout};

use super::steps::{Aim, Place};
use crate::{
    args::Libraries,
    keeper_protocol::{Process, Socket},
    worker::{PROGRAM, VISIBLE, describe},
};

/// How long a way may take: a minute is enough for 100 GiB.
const LASTS: Duration = Duration::from_mins(9);
/// How long a worker that has told what it came to, or is killed, may take to end.
const ENDING: Duration = Duration::from_secs(3);

/// What a worker is to do.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Way {
    /// Where to.
    pub(crate) aim: Aim,
    /// Whom.
    pub(crate) processes: Vec<Process>,
    /// How long each may take to be locked.
    pub(crate) lock_milliseconds: u32,
}

/// What a way came to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Told {
    /// Where the processes are; `None` where the driver could not be used.
    pub(crate) place: Option<Place>,
    /// What went wrong.
    pub(crate) message: Option<String>,
    /// The driver cannot do this at all.
    pub(crate) unable: bool,
}

/// What the keeper hears at the end of a way: an error is how the worker ended without a word.
#[derive(Debug)]
pub(crate) struct Ended {
    /// Which way.
    pub(crate) number: u64,
    /// What it came to.
    pub(crate) told: Result<Told, String>,
}

/// A worker on its way. Dropping it kills it.
#[derive(Debug)]
pub(crate) struct Mover {
    /// Which way.
    pub(crate) number: u64,
    task: JoinHandle<()>,
}

impl Mover {
    /// Starts a worker; the end of its way goes to `events`.
    pub(crate) fn start(
        device: &str,
        number: u64,
        way: Way,
        libraries: &Libraries,
        events: mpsc::UnboundedSender<Ended>,
    ) -> Self {
        let (device, libraries) = (device.to_owned(), libraries.clone());
        let task = tokio::spawn(async move {
            let told = go(&device, &way, &libraries).await;
            // Without a keeper there is nobody to tell.
            let _ = events.send(Ended { number, told });
        });
        Self { number, task }
    }
}

impl Drop for Mover {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn go(device: &str, way: &Way, libraries: &Libraries) -> Result<Told, String> {
    let plain = |error: io::Error| format!("cannot start a worker: {error}");
    let pair = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None);
    let (near, far) = pair.map_err(|error| plain(error.into()))?;
    let mut command = Command::new(PROGRAM);
    command.arg0("keeper").args(["mover", "--device", device]);
    let mut pass = |flag: &str, path: Option<&Path>| {
        if let Some(path) = path {
            command.arg(flag).arg(path);
        }
    };
    pass("--driver-library", libraries.driver_library.as_deref());
    pass("--cuda-library", libraries.cuda_library.as_deref());
    let child = command.env(VISIBLE, device).stdin(Stdio::from(far)).kill_on_drop(true).spawn();
    let mut child = child.map_err(plain)?;
    // It has the other end too, which would keep the connection open after a death.
    drop(command);
    let near = Socket::new(near).map_err(plain)?;
    let told = timeout(LASTS, async {
        near.send(way, &[]).await?;
        near.receive().await?.read::<Told>()
    });
    let told = told.await;
    if told.is_err() {
        // Fails only for one that has ended.
        let _ = child.start_kill();
    }
    let ended = timeout(ENDING, child.wait()).await;
    let how = match ended {
        Ok(Ok(status)) => describe(status),
        Ok(Err(error)) => error.to_string(),
        Err(_) => "it cannot be ended: its device is stuck".to_owned(),
    };
    match told {
        Ok(Ok(told)) => Ok(told),
        Ok(Err(error)) => Err(format!("the worker is gone: {error}, {how}")),
        Err(_) => Err(format!("the worker took longer than {} s: {how}", LASTS.as_secs())),
    }
}
