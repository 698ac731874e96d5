//! Serves the driver over a unix socket: a thread for each connection.

use std::fs::Permissions;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Instant;

use rustix::event::{PollFd, PollFlags, poll};

use crate::config::Config;
use crate::driver::{ClientId, Driver};
use crate::fault::{Fault, FaultKind};
use crate::identity::{Identity, Peer, watch};
use crate::protocol::{Control, Failure, Reply, Request, receive, send};

/// Enough for a request and its reply; hundreds of processes may be connected.
const STACK: usize = 256 << 10;

/// A daemon that listens but does not serve yet.
#[derive(Debug)]
pub struct Daemon {
    listener: UnixListener,
    driver: Shared,
}

#[derive(Debug, Clone)]
struct Shared(Arc<Mutex<Driver>>);

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Driver> {
        // A panic in one request leaves the ledger as consistent as its last statement.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Daemon {
    /// Listens at `path`, in the place of a daemon that is gone.
    ///
    /// # Errors
    /// When another daemon serves there, or the socket cannot be made.
    pub fn bind(path: &Path, config: Config) -> io::Result<Self> {
        if UnixStream::connect(path).is_ok() {
            let words = format!("another simulator serves at {}: stop it first", path.display());
            return Err(io::Error::new(io::ErrorKind::AddrInUse, words));
        }
        if let Some(directory) = path.parent() {
            std::fs::create_dir_all(directory)?;
        }
        match std::fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let listener = UnixListener::bind(path)?;
        // Pods run as any user.
        std::fs::set_permissions(path, Permissions::from_mode(0o666))?;
        Ok(Self { listener, driver: Shared(Arc::new(Mutex::new(Driver::new(config)))) })
    }

    /// Serves for ever.
    ///
    /// # Errors
    /// When no connection can be accepted any more.
    pub fn serve(self) -> io::Result<()> {
        loop {
            let (stream, _) = self.listener.accept()?;
            let driver = self.driver.clone();
            let started = thread::Builder::new().stack_size(STACK).spawn(move || match Peer::of(&stream) {
                Ok(peer) => serve_client(&driver, stream, &peer),
                Err(error) => tracing::warn!(%error, "refused a connection: its process is not known"),
            });
            if let Err(error) = started {
                tracing::warn!(%error, "refused a connection: no thread for it");
            }
        }
    }
}

/// Answers one process until it is gone or has closed its end, then takes back what it held.
fn serve_client(driver: &Shared, mut stream: UnixStream, peer: &Peer) {
    let client = driver.lock().connect(peer.identity.clone());
    if let Err(error) = answer_requests(driver, client, &mut stream, peer) {
        tracing::debug!(pid = peer.identity.pid, %error, "connection ended");
    }
    driver.lock().disconnect(client, Instant::now());
}

fn answer_requests(
    driver: &Shared,
    client: ClientId,
    stream: &mut UnixStream,
    peer: &Peer,
) -> io::Result<()> {
    let mut buffer = Vec::new();
    // The end of the stream is not enough: children inherit the socket and may outlive the
    // process. The process's own end is not enough either: it may replace itself by `exec`.
    while wait_for_request(stream, peer)? {
        let Some(request) = receive::<Request>(stream, &mut buffer)? else { break };
        let delay = driver.lock().delay(client, &request);
        if !delay.is_zero() {
            thread::sleep(delay);
        }
        let reply = match request {
            Request::Control(control) => answer_control(driver, client, control, peer),
            request => driver.lock().answer(client, request, Instant::now()),
        };
        send(stream, &reply)?;
    }
    Ok(())
}

/// Waits for the next request. False when the process is gone.
fn wait_for_request(stream: &UnixStream, peer: &Peer) -> io::Result<bool> {
    let mut ready = [PollFd::new(stream, PollFlags::IN), PollFd::new(&peer.pidfd, PollFlags::IN)];
    loop {
        match poll(&mut ready, None) {
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
            Ok(_) => break,
        }
    }
    let [_, gone] = ready;
    Ok(gone.revents().is_empty())
}

fn answer_control(
    driver: &Shared,
    client: ClientId,
    control: Control,
    peer: &Peer,
) -> Result<Reply, Failure> {
    if peer.uid != 0 && peer.uid != rustix::process::geteuid().as_raw() {
        return Err(Failure::Forbidden);
    }
    tracing::info!(pid = peer.identity.pid, ?control, "control");
    match control {
        Control::Inject(fault) => inject(driver, fault).map(|()| Reply::Done),
        control => driver.lock().answer(client, Request::Control(control), Instant::now()),
    }
}

/// Begins a fault, and finds the process that it names.
fn inject(driver: &Shared, fault: Fault) -> Result<(), Failure> {
    match fault.kind {
        FaultKind::Foreign { pid, .. } => {
            let missing = |error| {
                Failure::Invalid(format!("no process {pid} ({error}): use zombie for one that is gone"))
            };
            let identity = Identity::of(pid).map_err(missing)?;
            let pidfd = watch(pid).map_err(missing)?;
            driver.lock().inject(fault, Some(identity))?;
            let driver = driver.clone();
            let watcher = thread::Builder::new().stack_size(STACK).spawn(move || {
                let mut gone = [PollFd::from_borrowed_fd(pidfd.as_fd(), PollFlags::IN)];
                while poll(&mut gone, None).is_err() {}
                driver.lock().end_foreign(pid);
            });
            watcher.map(drop).map_err(|error| Failure::Invalid(error.to_string()))
        }
        FaultKind::Zombie { pid, .. } => {
            let shown = Identity::departed(pid).map_err(|error| Failure::Invalid(error.to_string()))?;
            driver.lock().inject(fault, Some(shown))
        }
        _ => driver.lock().inject(fault, None),
    }
}
