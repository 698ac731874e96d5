//! Descriptors that keep memory, passed from process to process by unix sockets.

use std::fs::Permissions;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};

/// How long to wait for whoever is to have the descriptor.
const PATIENCE: Duration = Duration::from_secs(30);
const RETRY: Duration = Duration::from_millis(20);

/// Hands a duplicate of the descriptor, and the size of what it keeps, to whoever connects, until
/// the process ends.
pub(crate) fn serve(path: &Path, descriptor: OwnedFd, bytes: u64) -> io::Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let listener = UnixListener::bind(path)?;
    // Other pods run as other users.
    std::fs::set_permissions(path, Permissions::from_mode(0o666))?;
    thread::Builder::new().name("share".into()).spawn(move || {
        for stream in listener.incoming().flatten() {
            // Whoever left in the meantime does not want it.
            let _ = send(&stream, &descriptor, bytes);
        }
    })?;
    Ok(())
}

fn send(stream: &UnixStream, descriptor: &OwnedFd, bytes: u64) -> io::Result<()> {
    let descriptors = [descriptor.as_fd()];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut beside = SendAncillaryBuffer::new(&mut space);
    beside.push(SendAncillaryMessage::ScmRights(&descriptors));
    sendmsg(stream, &[IoSlice::new(&bytes.to_le_bytes())], &mut beside, SendFlags::NOSIGNAL)?;
    Ok(())
}

/// Takes a descriptor, and the size of what it keeps, from whoever serves there.
pub(crate) fn take(path: &Path) -> io::Result<(OwnedFd, u64)> {
    let deadline = Instant::now() + PATIENCE;
    let stream = loop {
        match UnixStream::connect(path) {
            Err(_) if Instant::now() < deadline => thread::sleep(RETRY),
            result => break result?,
        }
    };
    let mut size = [0; 8];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut beside = RecvAncillaryBuffer::new(&mut space);
    let mut blocks = [IoSliceMut::new(&mut size)];
    recvmsg(&stream, &mut blocks, &mut beside, RecvFlags::CMSG_CLOEXEC | RecvFlags::WAITALL)?;
    let descriptors = beside.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut descriptors) => descriptors.next(),
        _ => None,
    });
    let descriptor =
        descriptors.ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "no descriptor came"))?;
    Ok((descriptor, u64::from_le_bytes(size)))
}
