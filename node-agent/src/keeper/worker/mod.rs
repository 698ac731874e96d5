//! The worker of a device: a child that loads the driver, makes memory, and passes the
//! descriptors on. This is the keeper's side of it.
//!
//! A worker may die at any time: what it passed on is held by the keeper alone, and what it did
//! not goes with it.

pub(crate) mod child;

use std::{
    io,
    os::fd::OwnedFd,
    path::Path,
    process::{ExitStatus, Stdio},
    time::Duration,
};

use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use serde::{Deserialize, Serialize};
use tokio::{
    process::{Child, Command},
    sync::mpsc,
    time::{Instant, sleep_until, timeout},
};
use tokio_util::sync::CancellationToken;
use tracing::{debug, warn};

use crate::{
    args::Libraries,
    keeper_protocol::{End, FrameError, Socket},
};

/// The program itself: the worker is another run of it.
pub(crate) const PROGRAM: &str = "/proc/self/exe";
/// The variable by which CUDA is shown one device: the way to reach each MIG instance.
pub(crate) const VISIBLE: &str = "CUDA_VISIBLE_DEVICES";
/// How long a worker with an order may be silent: a healthy one makes 8 GiB in some milliseconds,
/// and starts in a second or two where the driver is slow.
const SILENCE: Duration = Duration::from_secs(20);
/// How long a killed worker may take to end.
const ENDING: Duration = Duration::from_secs(3);

/// What the keeper tells its worker.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", rename_all_fields = "camelCase")]
pub(crate) enum Order {
    /// Make chunks, in this order: sizes in bytes, and how many of each. None: open the driver.
    Make {
        /// The chunks.
        chunks: Vec<(u64, u32)>,
        /// How many bytes must stay free on the device.
        keep_free: u64,
    },
    /// Make no more.
    Stop {},
}

/// What the worker tells.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", rename_all_fields = "camelCase")]
pub(crate) enum News {
    /// Chunks, with their descriptors beside the frame.
    Made {
        /// Their sizes, in the order of the descriptors.
        sizes: Vec<u64>,
    },
    /// The end of [`Order::Make`].
    Ended {
        /// Why.
        end: End,
        /// More of why.
        message: Option<String>,
        /// What was free then.
        free: Option<u64>,
    },
}

/// What the keeper hears of its workers.
#[derive(Debug)]
pub(crate) struct Event {
    /// UUID of the device.
    pub(crate) device: String,
    /// Which worker of the device.
    pub(crate) number: u64,
    /// What.
    pub(crate) what: What,
}

/// See [`Event`].
#[derive(Debug)]
pub(crate) enum What {
    /// Chunks, with their sizes.
    Made(Vec<(u64, OwnedFd)>),
    /// Fewer descriptors came than were sent: this process may have no more.
    Cut,
    /// An order ended.
    Ended {
        /// Why.
        end: End,
        /// More of why.
        message: Option<String>,
        /// What was free then.
        free: Option<u64>,
    },
    /// The worker is gone, or could not be ended.
    Gone(String),
}

/// A running worker. Dropping it ends it.
#[derive(Debug)]
pub(crate) struct Worker {
    /// Which worker of the device.
    pub(crate) number: u64,
    /// Its process, as this process sees it.
    pub(crate) pid: Option<u32>,
    orders: mpsc::UnboundedSender<Order>,
    end: CancellationToken,
}

impl Worker {
    /// Starts a worker for a device; whatever it has to say goes to `events`.
    pub(crate) fn start(
        device: &str,
        number: u64,
        libraries: &Libraries,
        events: mpsc::Sender<Event>,
    ) -> io::Result<Self> {
        let pair = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None);
        let (near, far) = pair?;
        let mut command = Command::new(PROGRAM);
        command.arg0("keeper").args(["worker", "--device", device]);
        let mut pass = |flag: &str, path: Option<&Path>| {
            if let Some(path) = path {
                command.arg(flag).arg(path);
            }
        };
        pass("--driver-library", libraries.driver_library.as_deref());
        pass("--cuda-library", libraries.cuda_library.as_deref());
        let child = command.env(VISIBLE, device).stdin(Stdio::from(far)).kill_on_drop(true).spawn()?;
        let pid = child.id();
        let (orders, ordered) = mpsc::unbounded_channel();
        let end = CancellationToken::new();
        let link = Link { device: device.to_owned(), number, socket: Socket::new(near)?, events };
        tokio::spawn(attend(link, child, ordered, end.clone()));
        Ok(Self { number, pid, orders, end })
    }

    /// Gives an order. A worker that is gone does not hear it; its end is told apart.
    pub(crate) fn order(&self, order: Order) {
        let _ = self.orders.send(order);
    }

    /// Kills the worker. What it sent and was not yet read is let go.
    pub(crate) fn end(&self) {
        self.end.cancel();
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.end();
    }
}

struct Link {
    device: String,
    number: u64,
    socket: Socket,
    events: mpsc::Sender<Event>,
}

impl Link {
    async fn tell(&self, what: What) {
        // Without a keeper there is nobody to tell.
        let _ = self.events.send(Event { device: self.device.clone(), number: self.number, what }).await;
    }
}

/// Carries orders and news until the worker ends, or has to.
async fn attend(
    link: Link,
    mut child: Child,
    mut orders: mpsc::UnboundedReceiver<Order>,
    end: CancellationToken,
) {
    // The worker owes news until then.
    let mut owes = None::<Instant>;
    let why = loop {
        tokio::select! {
            biased;
            () = end.cancelled() => break "ended by the keeper".to_owned(),
            () = until(owes) => break format!("said nothing for {} s", SILENCE.as_secs()),
            order = orders.recv() => {
                let Some(order) = order else { break "ended by the keeper".to_owned() };
                if matches!(order, Order::Make { .. }) {
                    owes = Some(Instant::now() + SILENCE);
                }
                // A worker reads at once what is this short; one that does not is dead.
                if let Err(error) = link.socket.send(&order, &[]).await {
                    break error.to_string();
                }
            }
            frame = link.socket.receive() => match frame.and_then(|frame| Ok((frame.read::<News>()?, frame))) {
                Ok((News::Made { sizes }, frame)) => {
                    owes = owes.map(|_| Instant::now() + SILENCE);
                    let cut = frame.cut || sizes.len() != frame.descriptors.len();
                    link.tell(What::Made(sizes.into_iter().zip(frame.descriptors).collect())).await;
                    if cut {
                        link.tell(What::Cut).await;
                    }
                }
                Ok((News::Ended { end, message, free }, _)) => {
                    owes = None;
                    link.tell(What::Ended { end, message, free }).await;
                }
                Err(FrameError::Closed) => break "ended".to_owned(),
                Err(error) => break error.to_string(),
            }
        }
    };
    // Descriptors on their way are let go with the socket.
    let Link { device, number, socket, events } = link;
    drop(socket);
    if why != "ended" {
        // Fails only for one that has ended.
        let _ = child.start_kill();
    }
    let how = match timeout(ENDING, child.wait()).await {
        Ok(Ok(status)) => format!("{why}, {}", describe(status)),
        Ok(Err(error)) => format!("{why}, {error}"),
        Err(_) => {
            warn!(device, "the worker cannot be ended: its device is stuck");
            format!("{why}, and cannot be ended")
        }
    };
    debug!(device, how, "the worker is gone");
    let _ = events.send(Event { device, number, what: What::Gone(how) }).await;
}

async fn until(deadline: Option<Instant>) {
    match deadline {
        Some(deadline) => sleep_until(deadline).await,
        None => std::future::pending().await,
    }
}

/// How a child ended, in words.
pub(crate) fn describe(status: ExitStatus) -> String {
    use std::os::unix::process::ExitStatusExt;
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("exit status {code}"),
        (None, Some(signal)) => format!("signal {signal}"),
        (None, None) => "unknown status".to_owned(),
    }
}
