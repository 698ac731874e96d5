//! One client's connection: who it is, its requests in turn, its replies.
//!
//! A client that floods is read as fast as it is answered; one that does not read is cut off; one
//! that sends what is no request hears so and is cut off. None delays another.

use std::{
    os::fd::{AsFd, OwnedFd},
    sync::Arc,
    time::Duration,
};

use tokio::{
    sync::{Semaphore, mpsc},
    time::{sleep, timeout},
};
use tokio_util::task::TaskTracker;
use tracing::{debug, warn};

use crate::{
    keeper_protocol::{
        Answer, Ask, FrameError, Outcome, Reason, Refusal, Reply, Request, Role, Socket, VERSION,
    },
    place::{Listener, is_trusted},
};

/// How many connections there may be: an agent, the one before it, a successor, and some probes.
const MOST_CONNECTIONS: usize = 16;
/// How many requests of a client may wait for their replies; the next is read after that.
const MOST_UNANSWERED: usize = 64;
/// How long a client may take to say hello, and to read a reply.
const PATIENCE: Duration = Duration::from_secs(5);

/// What comes from clients.
#[derive(Debug)]
pub(crate) enum FromClient {
    /// One said hello.
    Joined {
        /// Its number.
        client: u64,
        /// What it is.
        role: Role,
        /// Where its replies go. Dropping it ends the connection when all are sent.
        replies: mpsc::UnboundedSender<Outgoing>,
    },
    /// One asks.
    Asked {
        /// The client.
        client: u64,
        /// What.
        request: Request,
        /// The descriptors beside it.
        descriptors: Vec<OwnedFd>,
        /// Some of them were lost.
        cut: bool,
    },
    /// One is gone. Nothing of its replies is held any more.
    Gone {
        /// The client.
        client: u64,
    },
}

/// A reply with the descriptors beside it.
#[derive(Debug)]
pub(crate) struct Outgoing {
    /// The reply.
    pub(crate) reply: Reply,
    /// The descriptors.
    pub(crate) descriptors: Vec<Arc<OwnedFd>>,
}

impl Outgoing {
    /// Whether nothing more follows on the request.
    fn is_last(&self) -> bool {
        match &self.reply.result {
            Outcome::Ok(Answer::Batch(batch)) => batch.last.is_some(),
            Outcome::Ok(Answer::TakeOver {}) => false,
            _ => true,
        }
    }
}

/// Takes connections for ever.
pub(crate) async fn accept(
    listener: Listener,
    first: u64,
    events: mpsc::Sender<FromClient>,
    connections: TaskTracker,
) {
    let free = Arc::new(Semaphore::new(MOST_CONNECTIONS));
    for client in first.. {
        let Ok(permit) = Arc::clone(&free).acquire_owned().await else { return };
        let socket = loop {
            match listener.accept().await {
                Ok(socket) => break socket,
                // Out of descriptors, say: whoever waits goes on waiting.
                Err(error) => {
                    warn!(%error, "cannot take a connection");
                    sleep(Duration::from_millis(200)).await;
                }
            }
        };
        let events = events.clone();
        connections.spawn(async move {
            serve(&socket, client, events).await;
            drop(permit);
        });
    }
}

async fn serve(socket: &Socket, client: u64, events: mpsc::Sender<FromClient>) {
    let role = match timeout(PATIENCE, hello(socket)).await {
        Ok(Ok(role)) => role,
        Ok(Err(refusal)) => {
            debug!(client, %refusal, "a connection is refused");
            refuse(socket, refusal).await;
            return;
        }
        Err(_) => return,
    };
    let (replies, queue) = mpsc::unbounded_channel();
    if events.send(FromClient::Joined { client, role, replies }).await.is_ok() {
        exchange(socket, client, queue, &events).await;
        // Nobody to tell: nobody to mind.
        let _ = events.send(FromClient::Gone { client }).await;
    }
}

/// Who it is. Answers if it may stay.
async fn hello(socket: &Socket) -> Result<Role, Refusal> {
    let malformed = |error: FrameError| Refusal::new(Reason::Malformed, error.to_string());
    let (user, _) = socket.peer().map_err(|error| malformed(error.into()))?;
    if !is_trusted(user) {
        return Err(Refusal::new(
            Reason::NotAllowed,
            format!("only root may use the keeper, not user {user}"),
        ));
    }
    let frame = socket.receive().await.map_err(malformed)?;
    let Request { id, ask } = frame.read().map_err(malformed)?;
    let Ask::Hello { version, role } = ask else {
        return Err(Refusal::new(Reason::Malformed, "the first request must be hello"));
    };
    if version != VERSION {
        return Err(Refusal::new(Reason::Version, format!("this keeper speaks version {VERSION} only")));
    }
    let reply = Reply { id, result: Outcome::Ok(Answer::Done {}) };
    socket.send(&reply, &[]).await.map_err(malformed)?;
    Ok(role)
}

async fn exchange(
    socket: &Socket,
    client: u64,
    mut queue: mpsc::UnboundedReceiver<Outgoing>,
    events: &mpsc::Sender<FromClient>,
) {
    let mut unanswered = 0_usize;
    loop {
        tokio::select! {
            biased;
            outgoing = queue.recv() => {
                let Some(outgoing) = outgoing else { return };
                let descriptors: Vec<_> = outgoing.descriptors.iter().map(AsFd::as_fd).collect();
                match timeout(PATIENCE, socket.send(&outgoing.reply, &descriptors)).await {
                    Ok(Ok(())) => {}
                    Ok(Err(error)) => return debug!(client, %error, "a client is gone"),
                    Err(_) => return warn!(client, "a client does not read its replies: cut off"),
                }
                if outgoing.is_last() {
                    unanswered = unanswered.saturating_sub(1);
                }
            }
            frame = socket.receive(), if unanswered < MOST_UNANSWERED => {
                let read = frame.and_then(|frame| Ok((frame.read()?, frame)));
                let (request, frame) = match read {
                    Ok(read) => read,
                    Err(FrameError::Closed) => return,
                    Err(error) => {
                        warn!(client, %error, "a client is cut off");
                        return refuse(socket, Refusal::new(Reason::Malformed, error.to_string())).await;
                    }
                };
                unanswered += 1;
                let (descriptors, cut) = (frame.descriptors, frame.cut);
                if events.send(FromClient::Asked { client, request, descriptors, cut }).await.is_err() {
                    return;
                }
            }
        }
    }
}

/// Says why the connection ends, if the client listens.
async fn refuse(socket: &Socket, refusal: Refusal) {
    let reply = Reply { id: 0, result: Outcome::Error(refusal) };
    let _ = timeout(Duration::from_millis(200), socket.send(&reply, &[])).await;
}
