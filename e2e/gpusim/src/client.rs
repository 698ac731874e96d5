//! The calling end of the protocol.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::epoch::View;
use crate::protocol::{
    Control, DEFAULT_SOCKET, Failure, Reply, Request, SOCKET_VARIABLE, State, receive, receive_with, send,
};

/// A connection to the daemon.
#[derive(Debug)]
pub struct Client {
    stream: UnixStream,
    buffer: Vec<u8>,
    kept: Option<Kept>,
}

/// Replies that are the same as long as the epoch is.
#[derive(Debug)]
struct Kept {
    view: View,
    /// Readable while the epoch is about to end: memory was let go of.
    ends: OwnedFd,
    epoch: Option<u64>,
    replies: Vec<(Request, Reply)>,
}

impl Kept {
    /// The epoch, if it keeps replies; those of another are let go.
    fn begin(&mut self) -> Option<u64> {
        let epoch = self.view.epoch();
        if epoch != self.epoch {
            self.replies.clear();
            self.epoch = epoch;
        }
        epoch
    }

    fn reply(&self, request: &Request) -> Option<&Reply> {
        self.replies.iter().find(|(asked, _)| asked == request).map(|(_, reply)| reply)
    }
}

/// Why there is no reply.
#[derive(Debug)]
pub enum CallError {
    /// The daemon is gone or talks otherwise.
    Disconnected(io::Error),
    /// The daemon refused.
    Refused(Failure),
    /// The kernel did not let the descriptor in: this process has as many as it may have.
    NoDescriptor,
}

impl std::fmt::Display for CallError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Disconnected(error) => write!(f, "the simulated driver does not answer: {error}"),
            Self::Refused(failure) => failure.fmt(f),
            Self::NoDescriptor => f.write_str("this process may open no more descriptors"),
        }
    }
}

impl std::error::Error for CallError {}

/// The socket to connect to: [`SOCKET_VARIABLE`] where set, else [`DEFAULT_SOCKET`].
pub fn socket_path() -> PathBuf {
    std::env::var_os(SOCKET_VARIABLE).map_or_else(|| DEFAULT_SOCKET.into(), PathBuf::from)
}

impl Client {
    /// Connects to the daemon that listens at `path`.
    ///
    /// # Errors
    /// When none does.
    pub fn connect(path: &Path) -> io::Result<Self> {
        Ok(Self { stream: UnixStream::connect(path)?, buffer: Vec::new(), kept: None })
    }

    /// Connects as who asks the same again and again, and has the daemon answer only what may have
    /// changed.
    ///
    /// # Errors
    /// When no daemon listens there, or it goes.
    pub fn observe(path: &Path) -> io::Result<Self> {
        let mut client = Self::connect(path)?;
        client.kept = client.epoch()?;
        Ok(client)
    }

    /// What tells that replies are as they were. None from a daemon that has no such thing: then it
    /// answers everything.
    fn epoch(&mut self) -> io::Result<Option<Kept>> {
        let mut ask = |request| match self.call_with(&request) {
            Ok((_, descriptor)) => Ok(descriptor),
            Err(CallError::Disconnected(error)) => Err(error),
            Err(CallError::Refused(_) | CallError::NoDescriptor) => Ok(None),
        };
        let (Some(page), Some(ends)) = (ask(Request::Epoch)?, ask(Request::Ends)?) else { return Ok(None) };
        Ok(View::of(&page).ok().map(|view| Kept { view, ends, epoch: None, replies: Vec::new() }))
    }

    /// Connects to a daemon that may still be starting.
    ///
    /// # Errors
    /// When none answers within `patience`.
    pub fn connect_within(path: &Path, patience: Duration) -> io::Result<Self> {
        let deadline = Instant::now() + patience;
        loop {
            match Self::connect(path) {
                Err(_) if Instant::now() < deadline => std::thread::sleep(Duration::from_millis(2)),
                result => return result,
            }
        }
    }

    /// Asks and waits for the reply; one who observes does so without asking where the daemon is there
    /// and would say what it said before.
    ///
    /// # Errors
    /// When the daemon is gone or refuses.
    pub fn call(&mut self, request: &Request) -> Result<Reply, CallError> {
        // The epoch is read first: what the daemon says then is of this epoch or of a later one.
        let epoch = self.kept.as_mut().filter(|_| request.is_repeated()).and_then(Kept::begin);
        if epoch.is_none() {
            return self.ask(request);
        }
        // Read again at last: the daemon may have begun to take in what was let go of.
        if let Some(kept) = &self.kept
            && let Some(reply) = kept.reply(request)
            && self.is_same(&kept.ends)
            && kept.view.epoch() == epoch
        {
            return Ok(reply.clone());
        }
        let reply = self.ask(request)?;
        if let Some(kept) = &mut self.kept {
            kept.replies.push((request.clone(), reply.clone()));
        }
        Ok(reply)
    }

    /// Whether the epoch on the page is that of now: the daemon has the connection open, for one that is
    /// gone publishes nothing, and has taken in all that was let go of.
    fn is_same(&self, ends: &OwnedFd) -> bool {
        let mut watched = [PollFd::new(&self.stream, PollFlags::IN), PollFd::new(ends, PollFlags::IN)];
        poll(&mut watched, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).is_ok_and(|ready| ready == 0)
    }

    fn ask(&mut self, request: &Request) -> Result<Reply, CallError> {
        send(&mut self.stream, request).map_err(CallError::Disconnected)?;
        let reply = receive::<Result<Reply, Failure>>(&mut self.stream, &mut self.buffer);
        match reply {
            Ok(Some(Ok(reply))) => Ok(reply),
            Ok(Some(Err(failure))) => Err(CallError::Refused(failure)),
            Ok(None) => Err(CallError::Disconnected(io::ErrorKind::UnexpectedEof.into())),
            Err(error) => Err(CallError::Disconnected(error)),
        }
    }

    /// Asks for a descriptor that keeps an allocation.
    ///
    /// # Errors
    /// As [`Client::call`]; also when this process may open no more descriptors.
    pub fn export(&mut self, allocation: u64) -> Result<OwnedFd, CallError> {
        let (_, descriptor) = self.call_with(&Request::Export(allocation))?;
        descriptor.ok_or(CallError::NoDescriptor)
    }

    /// Asks for what comes with a descriptor beside it.
    fn call_with(&mut self, request: &Request) -> Result<(Reply, Option<OwnedFd>), CallError> {
        send(&mut self.stream, request).map_err(CallError::Disconnected)?;
        match receive_with::<Result<Reply, Failure>>(&self.stream, &mut self.buffer) {
            Ok(Some((Ok(reply), descriptor))) => Ok((reply, descriptor)),
            Ok(Some((Err(failure), _))) => Err(CallError::Refused(failure)),
            Ok(None) => Err(CallError::Disconnected(io::ErrorKind::UnexpectedEof.into())),
            Err(error) => Err(CallError::Disconnected(error)),
        }
    }

    /// Changes the simulator.
    ///
    /// # Errors
    /// As [`Client::call`].
    pub fn control(&mut self, control: Control) -> Result<Reply, CallError> {
        self.call(&Request::Control(control))
    }

    /// Everything that the simulator knows.
    ///
    /// # Errors
    /// As [`Client::call`].
    pub fn show(&mut self) -> Result<State, CallError> {
        match self.control(Control::Show)? {
            Reply::State(state) => Ok(state),
            other => {
                let words = format!("expected the state, got {other:?}");
                Err(CallError::Disconnected(io::Error::new(io::ErrorKind::InvalidData, words)))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;
    use crate::epoch::Page;
    use crate::protocol::{Memory, MemoryKind, ProcessList, Region};

    const WHOLE: Region = Region { device: 0, instance: None };

    /// An observer, and the page of its daemon, which answers with how many requests it has got and
    /// ends by the last of `most`.
    fn observer(most: u64) -> (Client, Page, thread::JoinHandle<()>) {
        let (stream, mut theirs) = UnixStream::pair().unwrap();
        let page = Page::create().unwrap();
        let daemon = thread::spawn(move || {
            let mut buffer = Vec::new();
            for used in 1..=most {
                if receive::<Request>(&mut theirs, &mut buffer).unwrap().is_none() {
                    break;
                }
                let reply: Result<Reply, Failure> =
                    Ok(Reply::Memory(Memory { total: used, reserved: 0, used, free: 0 }));
                send(&mut theirs, &reply).unwrap();
            }
        });
        let view = View::of(&page.descriptor().try_clone_to_owned().unwrap()).unwrap();
        // Nobody lets go of anything.
        let ends = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).unwrap();
        let kept = Some(Kept { view, ends, epoch: None, replies: Vec::new() });
        (Client { stream, buffer: Vec::new(), kept }, page, daemon)
    }

    /// The number of the request that the daemon answered so.
    fn number(client: &mut Client, request: &Request) -> u64 {
        match client.call(request).unwrap() {
            Reply::Memory(memory) => memory.used,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_reply_is_given_again_within_its_epoch_only() {
        let (mut client, page, _daemon) = observer(u64::MAX);
        let (memory, list) = (Request::Memory(WHOLE), Request::Processes(WHOLE, ProcessList::Compute));
        page.publish(1);
        assert_eq!([number(&mut client, &memory), number(&mut client, &memory)], [1, 1]);
        assert_eq!([number(&mut client, &list), number(&mut client, &memory)], [2, 1]);
        page.publish(2);
        assert_eq!([number(&mut client, &memory), number(&mut client, &memory)], [3, 3]);
        assert_eq!(number(&mut client, &list), 4);
    }

    #[test]
    fn nothing_is_given_again_in_an_unsettled_time() {
        let (mut client, page, _daemon) = observer(u64::MAX);
        let memory = Request::Memory(WHOLE);
        page.publish(1);
        assert_eq!(number(&mut client, &memory), 1);
        page.publish(0);
        assert_eq!([number(&mut client, &memory), number(&mut client, &memory)], [2, 3]);
        page.publish(2);
        assert_eq!([number(&mut client, &memory), number(&mut client, &memory)], [4, 4]);
    }

    #[test]
    fn what_changes_something_is_always_asked() {
        let (mut client, page, _daemon) = observer(u64::MAX);
        page.publish(1);
        let (kind, bytes) = (MemoryKind::Plain, 1);
        let allocate = Request::Allocate { region: WHOLE, kind, bytes, context: None };
        assert_eq!([number(&mut client, &allocate), number(&mut client, &allocate)], [1, 2]);
    }

    #[test]
    fn a_daemon_without_a_page_is_always_asked() {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("gpu.sock");
        let listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        let daemon = thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut asked = Vec::new();
            while let Some(request) = receive::<Request>(&mut stream, &mut Vec::new()).unwrap() {
                asked.push(request);
                send(&mut stream, &Err::<Reply, _>(Failure::NotSupported)).unwrap();
            }
            asked
        });
        let mut client = Client::observe(&socket).unwrap();
        let memory = Request::Memory(WHOLE);
        for _ in 0..2 {
            assert!(matches!(client.call(&memory), Err(CallError::Refused(Failure::NotSupported))));
        }
        drop(client);
        assert_eq!(daemon.join().unwrap(), [Request::Epoch, Request::Ends, memory.clone(), memory]);
    }

    #[test]
    fn a_daemon_that_is_gone_is_noticed_though_its_page_stays() {
        let (mut client, page, daemon) = observer(1);
        let memory = Request::Memory(WHOLE);
        page.publish(1);
        assert_eq!(number(&mut client, &memory), 1);
        daemon.join().unwrap();
        assert!(matches!(client.call(&memory), Err(CallError::Disconnected(_))));
    }
}
