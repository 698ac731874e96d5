//! The calling end of the protocol.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::protocol::{
    Control, DEFAULT_SOCKET, Failure, Reply, Request, SOCKET_VARIABLE, State, receive, receive_with, send,
};

/// A connection to the daemon.
#[derive(Debug)]
pub struct Client {
    stream: UnixStream,
    buffer: Vec<u8>,
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
        Ok(Self { stream: UnixStream::connect(path)?, buffer: Vec::new() })
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

    /// Asks and waits for the reply.
    ///
    /// # Errors
    /// When the daemon is gone or refuses.
    pub fn call(&mut self, request: &Request) -> Result<Reply, CallError> {
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
        send(&mut self.stream, &Request::Export(allocation)).map_err(CallError::Disconnected)?;
        match receive_with::<Result<Reply, Failure>>(&self.stream, &mut self.buffer) {
            Ok(Some((Ok(_), Some(descriptor)))) => Ok(descriptor),
            Ok(Some((Ok(_), None))) => Err(CallError::NoDescriptor),
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
