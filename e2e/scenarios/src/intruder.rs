//! Treats the socket of a pod's guard as nobody should, so that scenarios can see who suffers from
//! it: `intruder inside SOCKET` as a process of the pod, `intruder outside SOCKET` as one that is not.
//!
//! Fails where it was let do what it must not: change its quota, cut its pages short, be taken for a
//! process of another pod.

use std::{
    fs::File,
    mem::MaybeUninit,
    os::{fd::OwnedFd, unix::fs::FileExt as _},
    path::{Path, PathBuf},
    thread::sleep,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use clap::{Parser, Subcommand};
use highwater_guard_abi::{
    Versions,
    wire::{DeniedReason, FRAME, Hello, ToAgent, ToGuard},
};
use rustix::{
    io::{Errno, IoSliceMut},
    net::{
        AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendFlags, SocketAddrUnix,
        SocketFlags, SocketType, connect, recvmsg, send, socket_with,
        sockopt::{Timeout, set_socket_timeout},
    },
};

/// How long the agent may take to answer whoever is entitled to an answer, or to hang up.
const PATIENCE: Duration = Duration::from_secs(20);
/// Connections that send garbage.
const LIARS: u64 = 300;
/// Connections that say nothing.
const SILENT: usize = 200;
/// How long one connection asks without ever reading an answer.
const FLOOD: Duration = Duration::from_secs(2);
/// How often the page that the pod may write is filled with garbage.
const SCRIBBLES: u64 = 40;

#[derive(Debug, Parser)]
struct Arguments {
    #[command(subcommand)]
    place: Place,
}

#[derive(Debug, Subcommand)]
enum Place {
    /// As a process of the pod
    Inside {
        /// The socket
        socket: PathBuf,
    },
    /// As a process of another pod, or of none
    Outside {
        /// The socket
        socket: PathBuf,
    },
}

fn main() -> Result<()> {
    match Arguments::parse().place {
        Place::Inside { socket } => inside(&socket),
        Place::Outside { socket } => outside(&socket),
    }
}

fn inside(socket: &Path) -> Result<()> {
    let silent: Vec<_> = (0..SILENT).map(|_| dial(socket)).collect::<Result<_>>()?;
    say("nobody knows why these connections are there");
    for seed in 1..=LIARS {
        lie(socket, &mut Noise(seed))?;
    }
    say("nothing but garbage was said");
    ask_before_hello(socket)?;
    flood(socket)?;
    say("nobody reads the answers");
    scribble(socket)?;
    say("the pages are scribbled over");
    drop(silent);
    say("all was borne");
    Ok(())
}

fn outside(socket: &Path) -> Result<()> {
    let connection = dial(socket)?;
    say_frame(&connection, &hello(0))?;
    match hear(&connection)?.0 {
        Some(ToGuard::Denied { reason: DeniedReason::NotThisPod }) => {
            say("turned away");
            Ok(())
        }
        other => bail!("a process outside of the pod was answered {other:?}"),
    }
}

fn say(line: &str) {
    println!("intruder: {line}");
}

/// Sends a frame that is none, and looks that it is not taken for a greeting.
fn lie(socket: &Path, noise: &mut Noise) -> Result<()> {
    let connection = dial(socket)?;
    let mut frame = vec![0; noise.below(FRAME + 64) + 1];
    noise.fill(&mut frame);
    // Half of them begin as good ones do.
    let (good, length) = hello(0).encode();
    let honest = noise.next().is_multiple_of(2);
    if let (true, Some(good)) = (honest, good.get(..length)) {
        frame = good.to_vec();
        let at = noise.below(frame.len());
        if let Some(byte) = frame.get_mut(at) {
            *byte = byte.wrapping_add(1 + noise.next().to_le_bytes()[0] / 2);
        }
    }
    match send(&connection, &frame, SendFlags::NOSIGNAL) {
        Ok(_) | Err(Errno::PIPE | Errno::CONNRESET) => {}
        Err(error) => return Err(error).context("sending garbage"),
    }
    let (answer, _) = hear(&connection)?;
    // One byte more or less need not make a frame malformed.
    ensure!(honest || !matches!(answer, Some(ToGuard::Welcome { .. })), "garbage was welcomed: {frame:?}");
    Ok(())
}

/// Asks for everything without having said who it is.
fn ask_before_hello(socket: &Path) -> Result<()> {
    let connection = dial(socket)?;
    say_frame(&connection, &everything(1))?;
    let (answer, _) = hear(&connection)?;
    let denied = matches!(answer, None | Some(ToGuard::Denied { .. }));
    ensure!(denied, "a question before the greeting was answered {answer:?}");
    Ok(())
}

/// Asks for everything again and again, and never reads an answer.
fn flood(socket: &Path) -> Result<()> {
    let connection = dial(socket)?;
    say_frame(&connection, &hello(0))?;
    let end = Instant::now() + FLOOD;
    let mut ticket = 0;
    while Instant::now() < end {
        ticket += 1;
        let (frame, length) = everything(ticket).encode();
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        match send(&connection, frame.get(..length).unwrap_or_default(), flags) {
            Ok(_) => {}
            Err(Errno::AGAIN) => sleep(Duration::from_millis(1)),
            // It was cut off, as it should be.
            Err(Errno::PIPE | Errno::CONNRESET) => break,
            Err(error) => return Err(error).context("asking again and again"),
        }
    }
    Ok(())
}

/// Does to the pages whatever the kernel lets it.
fn scribble(socket: &Path) -> Result<()> {
    let connection = dial(socket)?;
    say_frame(&connection, &hello(0))?;
    let (answer, pages) = hear(&connection)?;
    ensure!(matches!(answer, Some(ToGuard::Welcome { .. })), "a process of the pod was answered {answer:?}");
    let [quota, usage]: [OwnedFd; 2] =
        pages.try_into().map_err(|pages: Vec<_>| anyhow::anyhow!("{} pages came", pages.len()))?;
    let (quota, usage) = (File::from(quota), File::from(usage));
    ensure!(quota.write_at(&[0xff; 64], 64).is_err(), "the pod may write its own quota");
    for (name, page) in [("quota", &quota), ("usage", &usage)] {
        let length = page.metadata()?.len();
        for other in [0, length / 2, length * 2] {
            ensure!(page.set_len(other).is_err(), "the {name} page could be made {other} bytes long");
        }
    }
    let mut content = vec![0; usize::try_from(usage.metadata()?.len())?];
    for seed in 1..=SCRIBBLES {
        Noise(seed).fill(&mut content);
        usage.write_all_at(&content, 0).context("scribbling over the usage page")?;
        sleep(FLOOD / 40);
    }
    Ok(())
}

fn hello(slot: u32) -> ToAgent {
    ToAgent::Hello(Hello { versions: Versions::OURS, slot, guard_version: *b"0.0-intruder\0\0\0\0" })
}

fn everything(ticket: u32) -> ToAgent {
    ToAgent::Grant { device: 0, ticket, wanted_total_units: u64::MAX, wait_milliseconds: u32::MAX }
}

fn dial(path: &Path) -> Result<OwnedFd> {
    let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
    for timeout in [Timeout::Recv, Timeout::Send] {
        set_socket_timeout(&socket, timeout, Some(PATIENCE))?;
    }
    let connected = connect(&socket, &SocketAddrUnix::new(path)?);
    connected.with_context(|| format!("connecting to {}", path.display()))?;
    Ok(socket)
}

fn say_frame(connection: &OwnedFd, message: &ToAgent) -> Result<()> {
    let (frame, length) = message.encode();
    send(connection, frame.get(..length).unwrap_or_default(), SendFlags::NOSIGNAL)?;
    Ok(())
}

/// What the agent answers, and with which descriptors; nothing where it hangs up.
fn hear(connection: &OwnedFd) -> Result<(Option<ToGuard>, Vec<OwnedFd>)> {
    let mut frame = [0; FRAME];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
    let mut beside = RecvAncillaryBuffer::new(&mut space);
    let mut blocks = [IoSliceMut::new(&mut frame)];
    let length = match recvmsg(connection, &mut blocks, &mut beside, RecvFlags::CMSG_CLOEXEC) {
        Ok(received) => received.bytes,
        Err(Errno::CONNRESET | Errno::PIPE) => 0,
        Err(Errno::AGAIN) => bail!("the agent neither answered nor hung up in {PATIENCE:?}"),
        Err(error) => return Err(error).context("listening to the agent"),
    };
    let mut descriptors = Vec::new();
    for message in beside.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            descriptors.extend(rights);
        }
    }
    let heard = frame.get(..length).filter(|frame| !frame.is_empty());
    let answer = heard.map(ToGuard::decode).transpose().context("what the agent says")?;
    Ok((answer, descriptors))
}

/// Numbers that look random and are the same in every run.
#[derive(Debug)]
struct Noise(u64);

impl Noise {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        let mixed = self.0 ^ (self.0 >> 33);
        mixed.wrapping_mul(0xff51_afd7_ed55_8ccd) >> 11
    }

    fn below(&mut self, bound: usize) -> usize {
        usize::try_from(self.next()).unwrap_or(0) % bound.max(1)
    }

    fn fill(&mut self, bytes: &mut [u8]) {
        for byte in bytes {
            *byte = self.next().to_le_bytes()[0];
        }
    }
}
