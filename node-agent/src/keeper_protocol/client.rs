//! The agent's end of a connection to the keeper.

use std::{
    collections::HashMap,
    io,
    os::fd::{BorrowedFd, OwnedFd},
    path::Path,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use tokio::{
    sync::oneshot,
    task::AbortHandle,
    time::{error::Elapsed, timeout},
};
use tokio_util::sync::CancellationToken;

use super::{
    Answer, Ask, Frame, FrameError, Moved, Outcome, ParkAsk, Reason, Refusal, Released, Reply, Request,
    Reserved, Role, Socket, Status, VERSION,
};

/// How long the keeper may take for what needs no device.
const SHORT: Duration = Duration::from_secs(3);
/// How long it may take to give back memory, and to stand down.
const CLOSING: Duration = Duration::from_secs(15);
/// How long a reservation may take: the keeper gives up on a silent worker well before.
const RESERVING: Duration = Duration::from_secs(90);

/// How long parking or restoring may take: the keeper gives up on a worker before.
const MOVING: Duration = Duration::from_mins(11);

/// Why the keeper did not do what was asked.
#[derive(Debug, thiserror::Error)]
pub(crate) enum KeeperError {
    /// Nobody listens at the socket.
    #[error("no keeper answers at its socket: {0}")]
    Absent(io::Error),
    /// The keeper refused.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// The keeper took too long. It may still do what was asked.
    #[error("the keeper did not answer in time")]
    Timeout(#[from] Elapsed),
    /// The connection is gone: connect again.
    #[error("the connection to the keeper is closed")]
    Closed,
    /// The keeper answered what was not asked, or what is no message.
    #[error("the keeper speaks another protocol: {0}")]
    Malformed(String),
}

impl KeeperError {
    /// The keeper's reason, if it refused.
    pub(crate) fn reason(&self) -> Option<Reason> {
        if let Self::Refused(refusal) = self { Some(refusal.reason) } else { None }
    }
}

impl From<FrameError> for KeeperError {
    fn from(error: FrameError) -> Self {
        match error {
            FrameError::Closed | FrameError::Io(_) => Self::Closed,
            FrameError::TooLarge | FrameError::Malformed(_) => Self::Malformed(error.to_string()),
        }
    }
}

/// A connection to the keeper. Clones share it: requests of several tasks run at once. It closes
/// with the last clone.
#[derive(Clone, Debug)]
pub(crate) struct Keeper(Arc<Connection>);

#[derive(Debug)]
struct Connection {
    socket: Arc<Socket>,
    waiting: Arc<Waiting>,
    next: AtomicU64,
    reader: AbortHandle,
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.reader.abort();
    }
}

/// Where the replies to requests go, by the requests' numbers.
type Replies = HashMap<u64, oneshot::Sender<(Outcome, Vec<OwnedFd>)>>;

/// Who waits for which reply.
#[derive(Debug, Default)]
struct Waiting {
    replies: Mutex<Replies>,
    closed: CancellationToken,
}

impl Waiting {
    fn replies(&self) -> MutexGuard<'_, Replies> {
        // Each change of the map is whole, whoever panicked.
        self.replies.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn close(&self) {
        self.closed.cancel();
        // Whoever waits learns it by the loss of the other half.
        self.replies().clear();
    }
}

impl Keeper {
    /// Connects as the node's agent.
    pub(crate) async fn connect(path: &Path) -> Result<Self, KeeperError> {
        Self::connect_as(path, Role::Agent).await
    }

    /// Connects as something else.
    pub(crate) async fn connect_as(path: &Path, role: Role) -> Result<Self, KeeperError> {
        Self::over(Socket::connect(path).map_err(KeeperError::Absent)?, role).await
    }

    /// Says hello over a connected socket.
    pub(crate) async fn over(socket: Socket, role: Role) -> Result<Self, KeeperError> {
        let (socket, waiting) = (Arc::new(socket), Arc::<Waiting>::default());
        let reader = tokio::spawn(read(Arc::clone(&socket), Arc::clone(&waiting))).abort_handle();
        let keeper = Self(Arc::new(Connection { socket, waiting, next: AtomicU64::new(1), reader }));
        keeper.ask(Ask::Hello { version: VERSION, role }, SHORT).await?;
        Ok(keeper)
    }

    /// What is held.
    pub(crate) async fn status(&self) -> Result<Status, KeeperError> {
        match self.ask(Ask::Status {}, SHORT).await? {
            Answer::Status(status) => Ok(status),
            other => Err(unasked(&other)),
        }
    }

    /// Holds up to `bytes` more of the device, and leaves at least `keep_free` bytes free. It is
    /// no error to get less: [`Reserved::end`] says why.
    pub(crate) async fn reserve(
        &self,
        device: &str,
        bytes: u64,
        keep_free: u64,
    ) -> Result<Reserved, KeeperError> {
        match self.ask(Ask::Reserve { device: device.to_owned(), bytes, keep_free }, RESERVING).await? {
            Answer::Reserved(reserved) => Ok(reserved),
            other => Err(unasked(&other)),
        }
    }

    /// Starts the device's worker, so that the next reservation need not wait for the driver.
    pub(crate) async fn warm(&self, device: &str) -> Result<Reserved, KeeperError> {
        self.reserve(device, 0, 0).await
    }

    /// Gives back at least `bytes` of the device, or all that is held. What chunks make it more
    /// is reserved again after the answer if `keep_free` says how much to leave free.
    pub(crate) async fn release(
        &self,
        device: &str,
        bytes: u64,
        keep_free: Option<u64>,
    ) -> Result<Released, KeeperError> {
        match self.ask(Ask::Release { device: device.to_owned(), bytes, keep_free }, CLOSING).await? {
            Answer::Released(released) => Ok(released),
            other => Err(unasked(&other)),
        }
    }

    /// Stands down, or no longer. Done when every handle is closed.
    pub(crate) async fn stand_down(&self, on: bool) -> Result<(), KeeperError> {
        self.ask(Ask::StandDown { on }, CLOSING).await.map(drop)
    }

    /// Moves the memory of a pod's processes to the host. To be asked only of a keeper whose
    /// [`Status::parking`] is there. What became of it after an error is in the status.
    pub(crate) async fn park(&self, what: ParkAsk) -> Result<Moved, KeeperError> {
        match self.ask(Ask::Park(what), MOVING).await? {
            Answer::Moved(moved) => Ok(moved),
            other => Err(unasked(&other)),
        }
    }

    /// Moves a parked pod's memory back to the device. As [`Keeper::park`].
    pub(crate) async fn restore(&self, pod: &str, device: &str) -> Result<Moved, KeeperError> {
        match self.ask(Ask::Restore { pod: pod.to_owned(), device: device.to_owned() }, MOVING).await? {
            Answer::Moved(moved) => Ok(moved),
            other => Err(unasked(&other)),
        }
    }

    /// Stores descriptors under a key, in place of what was there.
    pub(crate) async fn put(&self, key: &str, descriptors: &[BorrowedFd<'_>]) -> Result<(), KeeperError> {
        self.exchange(Ask::Put { key: key.to_owned() }, descriptors, SHORT).await.map(drop)
    }

    /// Duplicates of the descriptors under a key.
    pub(crate) async fn get(&self, key: &str) -> Result<Vec<OwnedFd>, KeeperError> {
        Ok(self.exchange(Ask::Get { key: key.to_owned() }, &[], SHORT).await?.1)
    }

    /// Forgets what is stored under a key, if anything is.
    pub(crate) async fn forget(&self, key: &str) -> Result<(), KeeperError> {
        self.ask(Ask::Drop { key: key.to_owned() }, SHORT).await.map(drop)
    }

    /// Every stored key, in order.
    pub(crate) async fn keys(&self) -> Result<Vec<String>, KeeperError> {
        let mut keys = Vec::<String>::new();
        loop {
            match self.ask(Ask::Keys { after: keys.last().cloned() }, SHORT).await? {
                Answer::Keys { keys: page } if page.is_empty() => return Ok(keys),
                Answer::Keys { keys: page } => keys.extend(page),
                other => return Err(unasked(&other)),
            }
        }
    }

    /// Waits until the connection is gone.
    pub(crate) async fn closed(&self) {
        self.0.waiting.closed.cancelled().await;
    }

    async fn ask(&self, ask: Ask, limit: Duration) -> Result<Answer, KeeperError> {
        Ok(self.exchange(ask, &[], limit).await?.0)
    }

    async fn exchange(
        &self,
        ask: Ask,
        descriptors: &[BorrowedFd<'_>],
        limit: Duration,
    ) -> Result<(Answer, Vec<OwnedFd>), KeeperError> {
        let Connection { socket, waiting, next, .. } = &*self.0;
        let id = next.fetch_add(1, Ordering::Relaxed);
        let (reply, replied) = oneshot::channel();
        waiting.replies().insert(id, reply);
        let exchanged = timeout(limit, async {
            if waiting.closed.is_cancelled() {
                return Err(KeeperError::Closed);
            }
            socket.send(&Request { id, ask }, descriptors).await?;
            replied.await.map_err(|_| KeeperError::Closed)
        });
        let exchanged = exchanged.await;
        waiting.replies().remove(&id);
        match exchanged?? {
            (Outcome::Ok(answer), descriptors) => Ok((answer, descriptors)),
            (Outcome::Error(refusal), _) => Err(refusal.into()),
        }
    }
}

fn unasked(answer: &Answer) -> KeeperError {
    KeeperError::Malformed(format!("not an answer to what was asked: {answer:?}"))
}

/// Brings each reply to who waits for it, until the connection ends.
async fn read(socket: Arc<Socket>, waiting: Arc<Waiting>) {
    while let Ok(frame) = socket.receive().await {
        let Ok(Reply { id, result }) = frame.read() else { break };
        let Frame { descriptors, .. } = frame;
        if let Some(reply) = waiting.replies().remove(&id) {
            // Whoever gave up waiting does not want it.
            let _ = reply.send((result, descriptors));
        }
    }
    waiting.close();
}
