//! The messages between the libraries and the daemon: frames of a little-endian 32-bit length and
//! that many bytes of JSON, strictly a request and then its reply.

use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};
use serde::{Deserialize, Serialize, de::DeserializeOwned};

use crate::config::Config;
use crate::fault::{Fault, FaultKind};
use crate::size::Bytes;

/// Where the daemon listens unless told otherwise.
pub const DEFAULT_SOCKET: &str = "/run/gpusim/gpu.sock";
/// Names another socket, for processes outside pods.
pub const SOCKET_VARIABLE: &str = "GPUSIM_SOCKET";

/// A frame longer than this is not ours.
const LONGEST_FRAME: usize = 16 << 20;

/// A device, or one MIG instance of it, by position.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Region {
    /// Device index.
    pub device: u32,
    /// Position of the instance in the device's layout.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub instance: Option<u32>,
}

impl Region {
    /// Whether memory in `other` is memory of this region too.
    pub fn covers(self, other: Self) -> bool {
        self.device == other.device && (self.instance.is_none() || self.instance == other.instance)
    }
}

/// NVML's three lists of processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum ProcessList {
    /// Processes with a compute context.
    Compute,
    /// Processes with a graphics context.
    Graphics,
    /// Clients of an MPS server.
    Mps,
}

impl std::str::FromStr for ProcessList {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "compute" => Ok(Self::Compute),
            "graphics" => Ok(Self::Graphics),
            "mps" => Ok(Self::Mps),
            _ => Err(format!("{text:?} is no process list: write compute, graphics or mps")),
        }
    }
}

/// How memory is made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum MemoryKind {
    /// `cuMemAlloc`.
    Plain,
    /// `cuMemAllocManaged`: takes device memory when touched, and is charged to nobody.
    Managed,
    /// `cuMemCreate`: charged only while the process has a context.
    Physical,
}

/// What a client asks.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", rename_all_fields = "camelCase")]
pub enum Request {
    /// The page of [`crate::epoch`]; it comes beside the reply.
    Epoch,
    /// What is readable while memory was let go of and the daemon has not taken that in; it comes
    /// beside the reply.
    Ends,
    /// Driver and devices.
    Inventory,
    /// Whether the region answers at all.
    Check(Region),
    /// Memory of a region.
    Memory(Region),
    /// Memory of a region as the asking process is to see it: within its limits.
    MemoryWithinLimits(Region),
    /// One list of processes.
    Processes(Region, ProcessList),
    /// Opens devices for CUDA.
    Attach {
        /// Their indices.
        devices: Vec<u32>,
        /// The lists that show this process once it has a context.
        lists: Vec<ProcessList>,
    },
    /// Makes a context.
    CreateContext(Region),
    /// Takes memory.
    Allocate {
        /// Where.
        region: Region,
        /// How.
        kind: MemoryKind,
        /// How much; rounded up to the granularity.
        bytes: u64,
        /// The context whose end frees it too.
        context: Option<u64>,
    },
    /// Puts managed memory on the device, as far as it fits.
    Touch {
        /// The allocation.
        id: u64,
        /// Its first bytes.
        bytes: u64,
    },
    /// Changes the size of an allocation that nobody shares; rounded up to the granularity.
    Resize {
        /// The allocation.
        id: u64,
        /// Its new size.
        bytes: u64,
    },
    /// Ends a context with its memory, or gives back one allocation or share.
    Free(u64),
    /// A descriptor that keeps an allocation of [`MemoryKind::Physical`]; it comes beside the
    /// reply.
    Export(u64),
    /// Takes a share in the memory that a descriptor keeps.
    Import(Descriptor),
    /// Takes a share in another process's allocation of [`MemoryKind::Plain`].
    Open(u64),
    /// Limits the memory of a cgroup, with all cgroups below it.
    SetLimits {
        /// Whole device.
        region: Region,
        /// Path of the cgroup.
        namespace: String,
        /// What it may keep when memory is short.
        soft: u64,
        /// What it may have.
        hard: u64,
    },
    /// The limits of a cgroup.
    GetLimits {
        /// Whole device.
        region: Region,
        /// Path of the cgroup.
        namespace: String,
    },
    /// Where a process is on its way to the host and back, by its PID as the asker counts it.
    ProcessState(u32),
    /// Moves a process on that way.
    Checkpoint {
        /// The process.
        pid: u32,
        /// How.
        step: CheckpointStep,
    },
    /// Changes or shows the simulator itself.
    Control(Control),
}

impl Request {
    /// Whether the request changes nothing that any request is answered by. What a fault has a
    /// read change is for [`crate::driver::Driver::is_settled`].
    pub(crate) fn is_read(&self) -> bool {
        match self {
            Self::Epoch
            | Self::Ends
            | Self::Inventory
            | Self::Check(_)
            | Self::Memory(_)
            | Self::MemoryWithinLimits(_)
            | Self::Processes(..)
            | Self::GetLimits { .. }
            | Self::ProcessState(_)
            | Self::Control(Control::Show) => true,
            Self::Attach { .. }
            | Self::CreateContext(_)
            | Self::Allocate { .. }
            | Self::Touch { .. }
            | Self::Resize { .. }
            | Self::Free(_)
            | Self::Export(_)
            | Self::Import(_)
            | Self::Open(_)
            | Self::SetLimits { .. }
            | Self::Checkpoint { .. }
            | Self::Control(_) => false,
        }
    }

    /// Whether an observer asks this again and again, so that its answer is worth keeping.
    pub(crate) fn is_repeated(&self) -> bool {
        matches!(self, Self::Check(_) | Self::Memory(_) | Self::MemoryWithinLimits(_) | Self::Processes(..))
    }
}

/// The steps by which a process's memory goes to the host and comes back.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum CheckpointStep {
    /// Its calls wait from now on.
    Lock,
    /// To the host.
    Checkpoint,
    /// Back to the device.
    Restore,
    /// Its calls go on.
    Unlock,
}

impl std::str::FromStr for CheckpointStep {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "lock" => Ok(Self::Lock),
            "checkpoint" => Ok(Self::Checkpoint),
            "restore" => Ok(Self::Restore),
            "unlock" => Ok(Self::Unlock),
            _ => Err(format!("{text:?} is no step: write lock, checkpoint, restore or unlock")),
        }
    }
}

/// `CUprocessState`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum ProcessState {
    /// It runs.
    Running = 0,
    /// Its calls wait.
    Locked = 1,
    /// Its memory is on the host.
    Checkpointed = 2,
    /// It is lost.
    Failed = 3,
}

/// How the kernel tells an open descriptor's file from all others.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Descriptor {
    /// Device number of its file system.
    pub device: u64,
    /// Inode number.
    pub inode: u64,
}

impl Descriptor {
    /// Asks the kernel.
    ///
    /// # Errors
    /// When the descriptor is not open.
    pub fn of(descriptor: BorrowedFd<'_>) -> io::Result<Self> {
        let facts = rustix::fs::fstat(descriptor)?;
        Ok(Self { device: facts.st_dev, inode: facts.st_ino })
    }
}

/// What `gpusim ctl` asks.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", rename_all_fields = "camelCase")]
pub enum Control {
    /// Everything.
    Show,
    /// Another host, as after a reboot.
    Reconfigure {
        /// The new host.
        config: Config,
        /// Even while processes hold memory, which they lose.
        force: bool,
    },
    /// Begins a fault.
    Inject(Fault),
    /// Ends faults: those of one device, of one kind by name, or all.
    Clear {
        /// Device index.
        device: Option<u32>,
        /// Name of the kind.
        kind: Option<String>,
    },
    /// Resets one device or all: ends its faults and empties it.
    Reset {
        /// Device index.
        device: Option<u32>,
        /// Even while processes hold memory, which they lose.
        force: bool,
    },
}

/// What the daemon answers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Reply {
    /// Nothing more to say.
    Done,
    /// To [`Request::Inventory`].
    Inventory(Inventory),
    /// To [`Request::Memory`].
    Memory(Memory),
    /// To [`Request::Processes`].
    Processes(Vec<Process>),
    /// The context or allocation that was made.
    Made(u64),
    /// To [`Request::Import`] and [`Request::Open`].
    Shared {
        /// The share, to be freed like an allocation.
        id: u64,
        /// Where the memory is.
        region: Region,
        /// Its size.
        bytes: u64,
    },
    /// To [`Request::GetLimits`].
    Limits {
        /// What the cgroup may keep when memory is short.
        soft: u64,
        /// What it may have; [`u64::MAX`] without a limit.
        hard: u64,
        /// What its processes have.
        used: u64,
    },
    /// To [`Request::ProcessState`].
    ProcessState(ProcessState),
    /// To [`Control::Show`].
    State(State),
    /// How many faults ended.
    Cleared(usize),
}

/// Why the daemon refused.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Failure {
    /// Not enough memory.
    OutOfMemory,
    /// No such device, instance, context or allocation.
    Unknown,
    /// The device has fallen off the bus.
    Lost,
    /// The device cannot say.
    NotSupported,
    /// The device is in use.
    InUse,
    /// Only root and the daemon's user may do that.
    Forbidden,
    /// The driver's version does not have that function.
    NoSuchFunction,
    /// There is no such cgroup.
    NoSuchCgroup,
    /// The memory cannot be shared, or the descriptor keeps none.
    NotShareable,
    /// A process cannot open its own memory as another's.
    OwnMemory,
    /// No such process uses CUDA.
    NoSuchProcess,
    /// The process is not where the step begins.
    OtherState,
    /// The process could not be locked in time.
    NotLocked,
    /// The request makes no sense; in words.
    Invalid(String),
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::OutOfMemory => "not enough device memory is free",
            Self::Unknown => "no such device, MIG instance, context or allocation",
            Self::Lost => "the device is lost",
            Self::NotSupported => "the device cannot do that",
            Self::InUse => "processes hold memory there: end them first, or force",
            Self::Forbidden => "only root and the daemon's own user may do that",
            Self::NoSuchFunction => "the driver's version does not have that function",
            Self::NoSuchCgroup => "there is no such cgroup",
            Self::NotShareable => "the memory cannot be shared, or the descriptor keeps none",
            Self::OwnMemory => "the memory is the process's own",
            Self::NoSuchProcess => "no such process uses CUDA",
            Self::OtherState => "the process is not where the step begins",
            Self::NotLocked => "the process could not be locked in time",
            Self::Invalid(words) => words,
        })
    }
}

impl std::error::Error for Failure {}

/// The driver and its devices.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Inventory {
    /// As NVML reports it.
    pub driver_version: String,
    /// 1000 * major + 10 * minor.
    pub cuda_version: i32,
    /// In index order.
    pub devices: Vec<DeviceFacts>,
}

/// What never changes about a device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct DeviceFacts {
    /// `GPU-...`.
    pub uuid: String,
    /// Product name.
    pub name: String,
    /// PCI bus number; domain 0, device 0.
    pub bus: u32,
    /// Bytes that allocations can have.
    pub usable: u64,
    /// MIG instances, in layout order.
    pub instances: Vec<InstanceFacts>,
}

/// What never changes about a MIG instance.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct InstanceFacts {
    /// `MIG-...`.
    pub uuid: String,
    /// Product name with the profile.
    pub name: String,
    /// Bytes that allocations can have.
    pub usable: u64,
    /// GPU instance number.
    pub gpu_instance: u32,
    /// Compute instance number.
    pub compute_instance: u32,
}

/// Memory of a region, in bytes: `total = reserved + used + free`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Memory {
    /// All of it.
    pub total: u64,
    /// Kept by the driver.
    pub reserved: u64,
    /// In use.
    pub used: u64,
    /// The rest.
    pub free: u64,
}

/// One entry of a process list.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Process {
    /// PID in the PID namespace of whoever asks.
    pub pid: u32,
    /// Bytes; absent where the driver does not say.
    pub bytes: Option<u64>,
    /// GPU and compute instance, under MIG.
    pub instance: Option<(u32, u32)>,
}

/// Everything, for people and tests.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct State {
    /// Driver and devices.
    pub inventory: Inventory,
    /// Memory of each device; absent where it cannot be read.
    pub memory: Vec<Option<Memory>>,
    /// Whoever holds memory, by host PID.
    pub holders: Vec<Holder>,
    /// Processes that do not run, because they are locked, on the host or lost.
    pub stopped: Vec<Stopped>,
    /// Memory that no process holds and descriptors keep.
    pub kept: Vec<Kept>,
    /// Memory of dead processes on its way back.
    pub leaving: Bytes,
    /// Limits of cgroups.
    pub limits: Vec<Limit>,
    /// Faults in force.
    pub faults: Vec<Fault>,
}

/// A process that holds memory.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Holder {
    /// Host PID.
    pub pid: u32,
    /// Where.
    pub region: Region,
    /// Contexts that it has there.
    pub contexts: u32,
    /// Bytes that NVML charges to it.
    pub charged: u64,
    /// Bytes that it uses and nobody is charged for.
    pub uncharged: u64,
}

/// A process that does not run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Stopped {
    /// Host PID.
    pub pid: u32,
    /// Where it is.
    pub state: ProcessState,
    /// Bytes that it has, on devices or on the host.
    pub bytes: u64,
}

/// Memory of a device that descriptors alone keep.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Kept {
    /// Where.
    pub region: Region,
    /// How many allocations.
    pub chunks: u64,
    /// Their size together.
    pub bytes: u64,
}

/// Limits of a cgroup on a device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Limit {
    /// Device index.
    pub device: u32,
    /// Path of the cgroup within its hierarchy.
    pub path: String,
    /// What it may keep when memory is short.
    pub soft: u64,
    /// What it may have.
    pub hard: u64,
    /// What its processes have.
    pub used: u64,
}

impl State {
    /// The faults of one kind.
    pub fn faults_named<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a FaultKind> {
        self.faults.iter().map(|fault| &fault.kind).filter(move |kind| kind.name() == name)
    }
}

/// Writes one message.
pub(crate) fn send<T: Serialize>(stream: &mut impl Write, message: &T) -> io::Result<()> {
    stream.write_all(&frame(message)?)
}

/// Writes one message with a descriptor beside it.
pub(crate) fn send_with<T: Serialize>(
    stream: &mut UnixStream,
    message: &T,
    descriptor: BorrowedFd<'_>,
) -> io::Result<()> {
    let frame = frame(message)?;
    let descriptors = [descriptor];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut beside = SendAncillaryBuffer::new(&mut space);
    beside.push(SendAncillaryMessage::ScmRights(&descriptors));
    let sent = sendmsg(&*stream, &[IoSlice::new(&frame)], &mut beside, SendFlags::NOSIGNAL)?;
    // The descriptor goes with the first byte.
    stream.write_all(frame.get(sent..).unwrap_or_default())
}

fn frame<T: Serialize>(message: &T) -> io::Result<Vec<u8>> {
    let mut frame = vec![0; 4];
    serde_json::to_writer(&mut frame, message)?;
    let length = u32::try_from(frame.len().saturating_sub(4)).map_err(io::Error::other)?;
    if let Some(header) = frame.first_chunk_mut() {
        *header = length.to_le_bytes();
    }
    Ok(frame)
}

/// Reads one message into `buffer`'s storage. `None` at the end of the stream.
pub(crate) fn receive<T: DeserializeOwned>(
    stream: &mut impl Read,
    buffer: &mut Vec<u8>,
) -> io::Result<Option<T>> {
    receive_by(|block| stream.read(block), buffer)
}

/// Reads one message, and the descriptor beside it, if there is one.
pub(crate) fn receive_with<T: DeserializeOwned>(
    stream: &UnixStream,
    buffer: &mut Vec<u8>,
) -> io::Result<Option<(T, Option<OwnedFd>)>> {
    let mut descriptor = None;
    let message = receive_by(
        |block| {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
            let mut beside = RecvAncillaryBuffer::new(&mut space);
            let mut blocks = [IoSliceMut::new(block)];
            let received = recvmsg(stream, &mut blocks, &mut beside, RecvFlags::CMSG_CLOEXEC)?;
            for message in beside.drain() {
                if let RecvAncillaryMessage::ScmRights(mut descriptors) = message {
                    descriptor = descriptors.next().or(descriptor.take());
                }
            }
            Ok(received.bytes)
        },
        buffer,
    )?;
    Ok(message.map(|message| (message, descriptor)))
}

/// Reads one message by a function that reads what is there.
fn receive_by<T: DeserializeOwned>(
    mut read: impl FnMut(&mut [u8]) -> io::Result<usize>,
    buffer: &mut Vec<u8>,
) -> io::Result<Option<T>> {
    // A request is answered before the next is sent, so one read usually takes the whole frame
    // and never a part of the next one.
    buffer.clear();
    let mut block = [0; 4096];
    loop {
        let length = match read(&mut block) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            result => result?,
        };
        if length == 0 {
            return if buffer.is_empty() { Ok(None) } else { Err(io::ErrorKind::UnexpectedEof.into()) };
        }
        buffer.extend_from_slice(block.get(..length).unwrap_or_default());
        let Some((header, body)) = buffer.split_first_chunk::<4>() else { continue };
        let expected = usize::try_from(u32::from_le_bytes(*header)).map_err(io::Error::other)?;
        if expected > LONGEST_FRAME || body.len() > expected {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "not a frame of the simulator's protocol",
            ));
        }
        if body.len() == expected {
            return serde_json::from_slice(body).map(Some).map_err(io::Error::from);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn a_message_arrives_as_it_was_sent() {
        let request = Request::Processes(Region { device: 3, instance: Some(1) }, ProcessList::Mps);
        let mut wire = Vec::new();
        send(&mut wire, &request).unwrap();
        let mut buffer = Vec::new();
        assert_eq!(receive::<Request>(&mut wire.as_slice(), &mut buffer).unwrap(), Some(request));
    }

    #[test]
    fn a_long_message_is_read_in_pieces() {
        let entry = Process { pid: 1, bytes: None, instance: None };
        let reply: Result<Reply, Failure> = Ok(Reply::Processes(vec![entry; 1000]));
        let mut wire = Vec::new();
        send(&mut wire, &reply).unwrap();
        assert!(wire.len() > 4096);
        let mut buffer = Vec::new();
        assert_eq!(receive(&mut wire.as_slice(), &mut buffer).unwrap(), Some(reply));
    }

    #[test]
    fn a_descriptor_arrives_beside_its_message() {
        let (mut ours, theirs) = UnixStream::pair().unwrap();
        let file = std::fs::File::open("/proc/self/stat").unwrap();
        let sent = Descriptor::of(file.as_fd()).unwrap();
        send_with(&mut ours, &Reply::Done, file.as_fd()).unwrap();
        let mut buffer = Vec::new();
        let (reply, descriptor) = receive_with::<Reply>(&theirs, &mut buffer).unwrap().unwrap();
        assert_eq!(reply, Reply::Done);
        assert_eq!(Descriptor::of(descriptor.unwrap().as_fd()).unwrap(), sent);
        send(&mut ours, &Reply::Done).unwrap();
        let (_, descriptor) = receive_with::<Reply>(&theirs, &mut buffer).unwrap().unwrap();
        assert!(descriptor.is_none());
    }

    #[test]
    fn a_broken_frame_is_an_error_and_an_end_is_none() {
        let mut buffer = Vec::new();
        assert_eq!(receive::<Request>(&mut [].as_slice(), &mut buffer).unwrap(), None);
        assert!(receive::<Request>(&mut [9, 0, 0].as_slice(), &mut buffer).is_err());
        assert!(receive::<Request>(&mut [255; 64].as_slice(), &mut buffer).is_err());
    }
}
