//! Where the keeper is reached: its socket, and those of the guard's volumes.

use std::{io, time::Duration};

use tokio::{sync::mpsc, task::AbortHandle, time::timeout};
use tokio_util::task::TaskTracker;
use tracing::{info, warn};

use crate::{
    args::Serve,
    connection::{FromClient, accept},
    csi::Csi,
    keeper_protocol::Socket,
    place::{Listener, Name, Place},
};

/// How long replies on their way may take at the end.
const FLUSHING: Duration = Duration::from_secs(1);

/// The open sockets. Dropping it closes them.
#[derive(Debug)]
pub(crate) struct Door {
    args: Serve,
    place: Place,
    events: mpsc::Sender<FromClient>,
    connections: TaskTracker,
    accepting: AbortHandle,
    name: Name,
    /// `None`: switched off, or not possible now.
    csi: Option<Csi>,
    /// Why it was not possible was said.
    told: bool,
    /// Numbers of clients are not used twice.
    openings: u64,
}

impl Door {
    pub(super) fn open(args: &Serve, place: &Place, events: mpsc::Sender<FromClient>) -> io::Result<Self> {
        let connections = TaskTracker::new();
        let (name, accepting) = listen(place, &events, &connections, 0)?;
        let (args, place) = (args.clone(), place.clone());
        let mut door =
            Self { args, place, events, connections, accepting, name, csi: None, told: false, openings: 0 };
        door.open_csi();
        Ok(door)
    }

    fn open_csi(&mut self) {
        if self.args.no_csi {
            return;
        }
        // The old one first: a path is taken from it, not shared.
        self.csi = None;
        match Csi::open(&self.args) {
            Ok(csi) => {
                self.csi = Some(csi);
                self.told = false;
            }
            Err(error) => {
                if !std::mem::replace(&mut self.told, true) {
                    warn!(error = format!("{error:#}"), "volumes cannot be served; trying again");
                }
            }
        }
    }

    /// Takes the paths back, from a successor that took them and is gone.
    pub(super) fn restore(&mut self) {
        if !self.name.holds() {
            self.openings += 1;
            match listen(&self.place, &self.events, &self.connections, self.openings << 32) {
                Ok((name, accepting)) => {
                    self.accepting.abort();
                    (self.name, self.accepting) = (name, accepting);
                    info!(path = %self.name.path().display(), "listening again");
                }
                Err(error) => {
                    warn!(%error, path = %self.name.path().display(), "cannot listen; trying again");
                }
            }
        }
        if !self.csi.as_ref().is_some_and(Csi::holds) {
            self.open_csi();
        }
    }

    /// Sees to it that the sockets are reached at their paths. False: another keeper is.
    pub(super) fn keep(&mut self) -> bool {
        if !self.name.holds() && Socket::connect(self.name.path()).is_ok() {
            return false;
        }
        self.restore();
        true
    }

    /// Takes no more connections.
    pub(super) fn close(&mut self) {
        self.accepting.abort();
        self.csi = None;
    }

    /// Waits until the last replies are sent.
    pub(super) async fn flushed(self) {
        self.connections.close();
        // Whoever does not read them by then does without.
        let _ = timeout(FLUSHING, self.connections.wait()).await;
    }
}

impl Drop for Door {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

fn listen(
    place: &Place,
    events: &mpsc::Sender<FromClient>,
    connections: &TaskTracker,
    first: u64,
) -> io::Result<(Name, AbortHandle)> {
    let (listener, name) = Name::take(&place.socket(), Listener::at)?;
    let accepting = tokio::spawn(accept(listener, first, events.clone(), connections.clone()));
    Ok((name, accepting.abort_handle()))
}
