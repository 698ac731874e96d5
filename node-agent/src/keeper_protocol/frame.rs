//! Frames on a `SOCK_SEQPACKET` socket: a text, and descriptors beside it.

use std::{
    io::{self, IoSlice, IoSliceMut},
    mem::MaybeUninit,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix,
    },
    path::Path,
};

use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType, recvmsg, sendmsg, socket_with,
};
use serde::{Serialize, de::DeserializeOwned};
use tokio::{io::Interest, net::UnixStream};

use super::{MOST_BYTES, MOST_DESCRIPTORS};

/// What the kernel passes at most.
const KERNELS_MOST: usize = 253;

/// Why a frame did not come or go.
#[derive(Debug, thiserror::Error)]
pub(crate) enum FrameError {
    /// The other end is gone.
    #[error("the other end closed the connection")]
    Closed,
    /// The frame is too long, or has too many descriptors.
    #[error("a frame may have {MOST_BYTES} bytes and {MOST_DESCRIPTORS} descriptors")]
    TooLarge,
    /// The text is not what was expected.
    #[error("not a message of this protocol: {0}")]
    Malformed(#[from] serde_json::Error),
    /// The kernel refused.
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// A frame that came.
#[derive(Debug)]
pub(crate) struct Frame {
    /// The text.
    pub(crate) text: Vec<u8>,
    /// The descriptors beside it, in the order in which they were sent.
    pub(crate) descriptors: Vec<OwnedFd>,
    /// Some descriptors at the end were lost, because this process may open no more.
    pub(crate) cut: bool,
}

impl Frame {
    /// Reads the text.
    pub(crate) fn read<T: DeserializeOwned>(&self) -> Result<T, FrameError> {
        Ok(serde_json::from_slice(&self.text)?)
    }
}

/// One end of a connection. Needs a runtime.
#[derive(Debug)]
pub(crate) struct Socket(UnixStream);

impl Socket {
    /// Takes a connected socket of type `SOCK_SEQPACKET`.
    pub(crate) fn new(socket: OwnedFd) -> io::Result<Self> {
        let socket = unix::net::UnixStream::from(socket);
        socket.set_nonblocking(true)?;
        UnixStream::from_std(socket).map(Self)
    }

    /// Connects to the socket at `path`. Does not wait: where nobody listens, or too many wait
    /// already, it fails.
    pub(crate) fn connect(path: &Path) -> io::Result<Self> {
        Self::connect_to(&SocketAddrUnix::new(path)?)
    }

    /// As [`Socket::connect`], to any address.
    pub(crate) fn connect_to(address: &SocketAddrUnix) -> io::Result<Self> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
        rustix::net::connect(&socket, address)?;
        Self::new(socket)
    }

    /// User and process at the other end, as this process sees them: 0 for a process of another
    /// PID namespace.
    pub(crate) fn peer(&self) -> io::Result<(u32, i32)> {
        let peer = self.0.peer_cred()?;
        Ok((peer.uid(), peer.pid().unwrap_or(0)))
    }

    /// Sends one frame; waits while the other end has not read what came before.
    pub(crate) async fn send(
        &self,
        message: &impl Serialize,
        descriptors: &[BorrowedFd<'_>],
    ) -> Result<(), FrameError> {
        let text = serde_json::to_vec(message)?;
        if text.len() > MOST_BYTES || descriptors.len() > MOST_DESCRIPTORS {
            return Err(FrameError::TooLarge);
        }
        let sent = self.0.async_io(Interest::WRITABLE, || send(self.as_fd(), &text, descriptors)).await;
        sent.map_err(|error| match error.kind() {
            io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset | io::ErrorKind::NotConnected => {
                FrameError::Closed
            }
            _ => FrameError::Io(error),
        })
    }

    /// Waits for a frame.
    pub(crate) async fn receive(&self) -> Result<Frame, FrameError> {
        let received = self.0.async_io(Interest::READABLE, || receive(self.as_fd())).await;
        settle(received)
    }
}

impl From<UnixStream> for Socket {
    fn from(stream: UnixStream) -> Self {
        Self(stream)
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Sends one frame on a socket without a runtime.
pub(crate) fn send_now(
    socket: BorrowedFd<'_>,
    message: &impl Serialize,
    descriptors: &[BorrowedFd<'_>],
) -> Result<(), FrameError> {
    Ok(send(socket, &serde_json::to_vec(message)?, descriptors)?)
}

/// Receives one frame on a socket without a runtime; waits if the socket does.
pub(crate) fn receive_now(socket: BorrowedFd<'_>) -> Result<Frame, FrameError> {
    settle(receive(socket))
}

fn send(socket: BorrowedFd<'_>, text: &[u8], descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
    let mut room = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(KERNELS_MOST))];
    let mut beside = SendAncillaryBuffer::new(&mut room);
    if !descriptors.is_empty() && !beside.push(SendAncillaryMessage::ScmRights(descriptors)) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    loop {
        match sendmsg(socket, &[IoSlice::new(text)], &mut beside, SendFlags::NOSIGNAL) {
            Err(rustix::io::Errno::INTR) => {}
            sent => return Ok(sent.map(drop)?),
        }
    }
}

/// A frame, and whether its text was cut.
fn receive(socket: BorrowedFd<'_>) -> io::Result<(Frame, bool)> {
    let mut text = vec![0; MOST_BYTES];
    let mut room = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(KERNELS_MOST))];
    let mut beside = RecvAncillaryBuffer::new(&mut room);
    let received = loop {
        let mut into = [IoSliceMut::new(&mut text)];
        match recvmsg(socket, &mut into, &mut beside, RecvFlags::CMSG_CLOEXEC) {
            Err(rustix::io::Errno::INTR) => {}
            received => break received?,
        }
    };
    text.truncate(received.bytes);
    text.shrink_to_fit();
    let mut descriptors = Vec::new();
    for message in beside.drain() {
        if let RecvAncillaryMessage::ScmRights(some) = message {
            descriptors.extend(some);
        }
    }
    let cut = received.flags.contains(ReturnFlags::CTRUNC);
    Ok((Frame { text, descriptors, cut }, received.flags.contains(ReturnFlags::TRUNC)))
}

fn settle(received: io::Result<(Frame, bool)>) -> Result<Frame, FrameError> {
    match received {
        Ok((_, true)) => Err(FrameError::TooLarge),
        // A closed connection reads as an empty packet, and no message of ours is empty.
        Ok((frame, false)) if frame.text.is_empty() => Err(FrameError::Closed),
        Ok((frame, false)) => Ok(frame),
        Err(error) if error.kind() == io::ErrorKind::ConnectionReset => Err(FrameError::Closed),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use rustix::net::socketpair;

    use super::*;

    fn pair() -> (Socket, OwnedFd) {
        let (one, other) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
        (Socket::new(one).unwrap(), other)
    }

    #[tokio::test]
    async fn a_frame_arrives_whole_with_its_descriptors() {
        let (near, far) = pair();
        let file = File::open("/dev/null").unwrap();
        let many = vec![file.as_fd(); MOST_DESCRIPTORS];
        near.send(&"text", &many).await.unwrap();
        near.send(&2, &[]).await.unwrap();
        let first = receive_now(far.as_fd()).unwrap();
        assert_eq!((first.read::<String>().unwrap().as_str(), first.descriptors.len()), ("text", many.len()));
        assert!(!first.cut);
        assert_eq!(receive_now(far.as_fd()).unwrap().read::<u8>().unwrap(), 2);
        send_now(far.as_fd(), &"back", &[]).unwrap();
        assert_eq!(near.receive().await.unwrap().read::<String>().unwrap(), "back");
        drop(far);
        assert!(matches!(near.receive().await, Err(FrameError::Closed)));
        assert!(matches!(near.send(&1, &[]).await, Err(FrameError::Closed)));
    }

    #[tokio::test]
    async fn what_is_too_large_is_refused_at_both_ends() {
        let (near, far) = pair();
        let long = "x".repeat(MOST_BYTES);
        assert!(matches!(near.send(&long, &[]).await, Err(FrameError::TooLarge)));
        let file = File::open("/dev/null").unwrap();
        let many = vec![file.as_fd(); MOST_DESCRIPTORS + 1];
        assert!(matches!(near.send(&1, &many).await, Err(FrameError::TooLarge)));
        send_now(far.as_fd(), &long, &[]).unwrap();
        assert!(matches!(near.receive().await, Err(FrameError::TooLarge)));
        send_now(far.as_fd(), &1, &[]).unwrap();
        assert_eq!(near.receive().await.unwrap().read::<u8>().unwrap(), 1);
    }

    #[tokio::test]
    async fn the_peer_is_known() {
        let (near, _far) = pair();
        assert_eq!(near.peer().unwrap().0, rustix::process::getuid().as_raw());
    }
}
