//! Taking over: from nobody, or from a keeper that runs.
//!
//! The successor receives duplicates of every descriptor, then takes the socket's path, then says
//! `done`; until that, the old keeper goes on as before if the successor ends. So whichever of
//! the two is killed, and whenever, what the other has goes on being held. Only the one that
//! answers at the path counts it.

use std::{collections::BTreeMap, io, time::Duration};

use anyhow::{Context, bail, ensure};
use tokio::time::{Instant, sleep, timeout};
use tracing::{info, warn};

use crate::{
    descriptors::Holdings,
    keeper_protocol::{Answer, Ask, Batch, FrameError, Outcome, Reply, Request, Role, Socket, VERSION},
    place::{Lock, Place},
};

/// How long a keeper may take to answer, or to hand over the next batch.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long to wait for a keeper that lives and does not listen, or listens and does not answer.
const HUNG: Duration = Duration::from_secs(20);
/// How long the predecessor may take to close what it handed over before this keeper serves.
const CLOSING: Duration = Duration::from_secs(3);
/// Between two looks at what another keeper does.
const PAUSE: Duration = Duration::from_millis(100);
/// Number of the requests; there is one at a time.
const HELLO: u64 = 1;
const HAND_OVER: u64 = 2;
const DONE: u64 = 3;

/// What a keeper starts with.
#[derive(Debug, Default)]
pub(crate) struct Inheritance {
    /// What it holds.
    pub(crate) holdings: Holdings,
    /// The keeper that handed it over, until it is told that this is done.
    pub(crate) predecessor: Option<Predecessor>,
    /// A keeper may live that did not hand anything over.
    pub(crate) unknown: bool,
    /// Keeps other keepers from starting meanwhile.
    pub(crate) starting: Option<Lock>,
}

/// The keeper that handed over.
#[derive(Debug)]
pub(crate) struct Predecessor(Socket);

/// Gets what there is to take over. A keeper that was here before waits until the one that runs
/// ends; a new one asks it at once.
pub(crate) async fn inherit(place: &Place, new: bool) -> anyhow::Result<Inheritance> {
    let since = Instant::now();
    let mut told = false;
    loop {
        let Some(starting) = place.try_start_lock()? else {
            if since.elapsed() > HUNG && !std::mem::replace(&mut told, true) {
                warn!("another keeper has been starting for long; waiting for it");
            }
            sleep(PAUSE).await;
            continue;
        };
        match connect(place).await {
            Ok(Some(socket)) if new => return hand_over(place, socket, starting).await,
            Ok(Some(socket)) => {
                drop(starting);
                if let Some(inheritance) = stand_by(place, socket).await? {
                    return Ok(inheritance);
                }
            }
            Ok(None) => match place.try_holder_lock()? {
                // Given back: it is taken for good when there is something to hold.
                Some(lock) => {
                    drop(lock);
                    return Ok(Inheritance { starting: Some(starting), ..Inheritance::default() });
                }
                None if since.elapsed() > HUNG => return Ok(give_up(starting)),
                // It may be about to take its path back from a successor that died.
                None => {}
            },
            Err(error) => {
                if !std::mem::replace(&mut told, true) {
                    warn!(error = format!("{error:#}"), "the keeper that runs does not answer yet");
                }
                if since.elapsed() > HUNG {
                    return Ok(give_up(starting));
                }
            }
        }
        sleep(PAUSE).await;
    }
}

fn give_up(starting: Lock) -> Inheritance {
    warn!("a keeper lives and does not hand over: starting without what it holds");
    Inheritance { unknown: true, starting: Some(starting), ..Inheritance::default() }
}

/// A connection to the keeper that runs, if one does.
async fn connect(place: &Place) -> anyhow::Result<Option<Socket>> {
    let socket = match Socket::connect(&place.socket()) {
        Ok(socket) => socket,
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused) => {
            return Ok(None);
        }
        Err(error) => return Err(error).context("connect to the keeper that runs"),
    };
    let hello = Ask::Hello { version: VERSION, role: Role::Successor };
    say(&socket, HELLO, hello).await?;
    match listen(&socket).await? {
        (Reply { id: HELLO, result: Outcome::Ok(Answer::Done {}) }, _) => Ok(Some(socket)),
        (Reply { result: Outcome::Error(refusal), .. }, _) => Err(refusal.into()),
        (other, _) => bail!("it answers hello with {other:?}"),
    }
}

/// Waits until the keeper that runs ends. `None`: it did so without handing over.
async fn stand_by(place: &Place, socket: Socket) -> anyhow::Result<Option<Inheritance>> {
    loop {
        let frame = match socket.receive().await {
            Ok(frame) => frame,
            Err(FrameError::Closed) => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        if let Reply { result: Outcome::Ok(Answer::TakeOver {}), .. } = frame.read()? {
            info!("the keeper that runs ends: taking over from it");
            // Without the lock another one is starting, and takes over instead.
            return match place.try_start_lock()? {
                Some(starting) => hand_over(place, socket, starting).await.map(Some),
                None => Ok(None),
            };
        }
    }
}

/// Receives everything.
async fn hand_over(place: &Place, socket: Socket, starting: Lock) -> anyhow::Result<Inheritance> {
    say(&socket, HAND_OVER, Ask::HandOver {}).await?;
    let mut holdings = Holdings { devices: BTreeMap::new(), ..Holdings::default() };
    let mut received = 0_usize;
    loop {
        let (reply, descriptors) = match listen(&socket).await {
            Ok(heard) => heard,
            // The other one died: what has come is all there is. One that lives still counts it.
            Err(_) if received > 0 && place.try_holder_lock()?.is_some() => {
                warn!(
                    descriptors = received,
                    "the keeper that handed over died: going on with what has come"
                );
                return Ok(Inheritance { holdings, starting: Some(starting), ..Inheritance::default() });
            }
            Err(error) => return Err(error),
        };
        let batch = match reply {
            Reply { id: HAND_OVER, result: Outcome::Ok(Answer::Batch(batch)) } => batch,
            Reply { result: Outcome::Error(refusal), .. } => return Err(refusal.into()),
            other => bail!("it hands over with {other:?}"),
        };
        received = received.saturating_add(descriptors.len());
        match batch {
            Batch { last: Some(last), .. } => {
                ensure!(
                    last.descriptors == received,
                    "it handed over {} descriptors, and {received} arrived",
                    last.descriptors
                );
                holdings.stand_down = last.stand_down;
                break;
            }
            Batch { device: Some(device), sizes, .. } => {
                ensure!(sizes.len() == descriptors.len(), "{} chunks lost their descriptors", sizes.len());
                let chunks = holdings.devices.entry(device).or_default();
                sizes.into_iter().zip(descriptors).for_each(|(size, chunk)| chunks.add(size, chunk));
            }
            Batch { key: Some(key), .. } => {
                holdings.stored.entry(key).or_default().extend(descriptors.into_iter().map(Into::into));
            }
            Batch { .. } => {}
        }
    }
    info!(descriptors = received, "received what another keeper holds");
    Ok(Inheritance {
        holdings,
        predecessor: Some(Predecessor(socket)),
        unknown: false,
        starting: Some(starting),
    })
}

impl Predecessor {
    /// Tells it that it is done. Returns it again if it did not close everything in time.
    pub(crate) async fn done(self) -> Option<Self> {
        // One that is gone has closed everything.
        say(&self.0, DONE, Ask::Done {}).await.ok()?;
        if timeout(CLOSING, self.gone()).await.is_ok() {
            return None;
        }
        warn!("the keeper that handed over has not closed what it held");
        Some(self)
    }

    /// Waits until it has closed everything.
    pub(crate) async fn gone(&self) {
        while let Ok(frame) = self.0.receive().await {
            if matches!(frame.read(), Ok(Reply { id: DONE, result: Outcome::Ok(_) })) {
                return;
            }
        }
    }
}

async fn say(socket: &Socket, id: u64, ask: Ask) -> anyhow::Result<()> {
    let request = Request { id, ask };
    Ok(timeout(PATIENCE, socket.send(&request, &[]))
        .await
        .context("the keeper that runs does not read")??)
}

async fn listen(socket: &Socket) -> anyhow::Result<(Reply, Vec<std::os::fd::OwnedFd>)> {
    let frame =
        timeout(PATIENCE, socket.receive()).await.context("the keeper that runs does not answer")??;
    ensure!(!frame.cut, "this process may not open as many descriptors as are handed over");
    Ok((frame.read()?, frame.descriptors))
}
