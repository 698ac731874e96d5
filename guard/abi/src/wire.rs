//! The messages between guard and agent, one a packet on a `SOCK_SEQPACKET` socket.
//!
//! A frame is a header (magic `u32`, kind `u16`, length of the whole frame `u16`) and fixed fields,
//! all little-endian. Neither side trusts the other: [`ToAgent::decode`] and [`ToGuard::decode`]
//! take any bytes. What a newer peer appends to a frame is ignored; a value that is not known is
//! refused. The version is agreed upon by the first two frames, whose fields never change.

use core::fmt;

use crate::Versions;

/// The longest frame.
pub const FRAME: usize = 256;

const MAGIC: u32 = u32::from_le_bytes(*b"HWGD");
const HEADER: usize = 8;

// 1 was never sent, and means nothing.
/// The program has looked up entry points that the guard does not cover.
pub const STRENGTH_UNCOVERED: u32 = 2;
/// The program is a client of MPS.
pub const STRENGTH_MPS: u32 = 4;
/// The guard lets everything through in this process.
pub const STRENGTH_STOPPED: u32 = 8;

/// Why a frame was not understood.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Malformed {
    /// It is too short for what it says that it is.
    Short,
    /// It does not begin as a frame does.
    Magic,
    /// There is no such message in this direction.
    Kind(u16),
    /// The length in it is not that of the packet.
    Length,
    /// A field has a value that is not known.
    Value,
}

impl fmt::Display for Malformed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Short => f.write_str("the frame is too short"),
            Self::Magic => f.write_str("this is no frame of the guard"),
            Self::Kind(kind) => write!(f, "messages of kind {kind} are not known"),
            Self::Length => f.write_str("the frame is not as long as it says"),
            Self::Value => f.write_str("the frame has a value that is not known"),
        }
    }
}

impl core::error::Error for Malformed {}

/// A frame that is being written.
struct Writer {
    frame: [u8; FRAME],
    length: usize,
}

impl Writer {
    fn new(kind: u16) -> Self {
        let mut writer = Self { frame: [0; FRAME], length: 0 };
        writer.put(&MAGIC.to_le_bytes());
        writer.put(&kind.to_le_bytes());
        writer.put(&[0; 2]);
        writer
    }

    fn put(&mut self, bytes: &[u8]) {
        let end = self.length.saturating_add(bytes.len());
        // Every message is far shorter than a frame; a test encodes each of them.
        if let Some(room) = self.frame.get_mut(self.length..end) {
            room.copy_from_slice(bytes);
            self.length = end;
        }
    }

    fn finish(mut self) -> ([u8; FRAME], usize) {
        if let (Some(room), Ok(length)) = (self.frame.get_mut(6..HEADER), u16::try_from(self.length)) {
            room.copy_from_slice(&length.to_le_bytes());
        }
        (self.frame, self.length)
    }
}

/// A frame that is being read.
struct Reader<'a> {
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    /// Takes the header off; returns the kind.
    fn open(packet: &'a [u8]) -> Result<(u16, Self), Malformed> {
        let mut reader = Self { rest: packet };
        if reader.u32()? != MAGIC {
            return Err(Malformed::Magic);
        }
        let kind = reader.u16()?;
        if usize::from(reader.u16()?) != packet.len() || packet.len() > FRAME {
            return Err(Malformed::Length);
        }
        Ok((kind, reader))
    }

    fn take<const N: usize>(&mut self) -> Result<[u8; N], Malformed> {
        let (bytes, rest) = self.rest.split_first_chunk::<N>().ok_or(Malformed::Short)?;
        self.rest = rest;
        Ok(*bytes)
    }

    fn u16(&mut self) -> Result<u16, Malformed> {
        self.take().map(u16::from_le_bytes)
    }

    fn u32(&mut self) -> Result<u32, Malformed> {
        self.take().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Result<u64, Malformed> {
        self.take().map(u64::from_le_bytes)
    }

    /// One of a list of reasons, by its number.
    fn one_of<T: Copy>(&mut self, all: &[T]) -> Result<T, Malformed> {
        let number = usize::try_from(self.u32()?).map_err(|_| Malformed::Value)?;
        number.checked_sub(1).and_then(|index| all.get(index)).copied().ok_or(Malformed::Value)
    }
}

/// A set of reasons that travel by number, from 1.
macro_rules! reasons {
    ($(#[$about:meta])* $name:ident { $($(#[$doc:meta])* $variant:ident = $number:literal,)* }) => {
        $(#[$about])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum $name {
            $($(#[$doc])* $variant = $number,)*
        }

        impl $name {
            /// All of them, in the order of their numbers.
            pub const ALL: &'static [Self] = &[$(Self::$variant),*];

            fn number(self) -> [u8; 4] {
                (self as u32).to_le_bytes()
            }
        }
    };
}

reasons! {
    /// Why the guard refused an allocation.
    RefusedReason {
        /// It would have gone over the pod's limit.
        OverLimit = 1,
        /// It was within the limit, but not granted in time.
        NotGranted = 2,
        /// The quota does not even hold a context and 64 MiB.
        QuotaBelowContext = 3,
        /// It was managed memory, which is refused for this pod.
        Managed = 4,
        /// The guard could not charge it at all.
        Invalid = 5,
    }
}

reasons! {
    /// Why the agent turns a guard away.
    DeniedReason {
        /// They have no version in common.
        Abi = 1,
        /// The process does not belong to the pod whose socket this is.
        NotThisPod = 2,
        /// All slots are taken.
        NoSlot = 3,
        /// The agent does not know yet what the pod may have; try again.
        NotReady = 4,
        /// It sent something else than a frame of this protocol.
        Malformed = 5,
    }
}

reasons! {
    /// Why more was not granted.
    NotGrantedReason {
        /// It is above the pod's limit.
        OverLimit = 1,
        /// The device has no memory that the pod could have now.
        NoMemory = 2,
        /// The device is not one of the pod's.
        UnknownDevice = 3,
        /// There was none within the time that the guard would wait.
        Timeout = 4,
        /// The agent is stopping.
        Stopping = 5,
    }
}

/// The guard's first message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hello {
    /// What the guard speaks.
    pub versions: Versions,
    /// The slot that this very process image holds already, when it connects again; 0 if none.
    pub slot: u32,
    /// Version of the guard as text, filled up with zeroes.
    pub guard_version: [u8; 16],
}

/// What a guard says to the agent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ToAgent {
    /// Always first.
    Hello(Hello),
    /// Asks that the pod's processes may have more.
    Grant {
        /// Ordinal of the device.
        device: u32,
        /// Comes back in the answer.
        ticket: u32,
        /// What the pod would have charged in total, in units of 4 KiB.
        wanted_total_units: u64,
        /// How long the guard would wait.
        wait_milliseconds: u32,
    },
    /// Says that an allocation was refused. Nobody answers.
    Refused {
        /// Ordinal of the device.
        device: u32,
        /// Size of the allocation.
        bytes: u64,
        /// Why.
        reason: RefusedReason,
    },
    /// Says what weakens the guard in this process, as `STRENGTH_*` bits. Nobody answers.
    Strength {
        /// The bits.
        flags: u32,
    },
}

/// What the agent says to a guard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ToGuard {
    /// Answers Hello. Carries the descriptors of the quota page and the usage page, in this order.
    Welcome {
        /// The version that both speak from now on, which is that of the pages.
        abi: u32,
        /// The process's slot.
        slot: u32,
        /// Devices in the quota page.
        devices: u32,
        /// UID of the pod as text, filled up with zeroes.
        pod_uid: [u8; 40],
    },
    /// Answers Hello; the connection ends.
    Denied {
        /// Why.
        reason: DeniedReason,
    },
    /// Answers Grant. The quota page says so already.
    Granted {
        /// Ordinal of the device.
        device: u32,
        /// From the question.
        ticket: u32,
        /// What the pod may have charged in total, in units of 4 KiB.
        granted_units: u64,
    },
    /// Answers Grant.
    NotGranted {
        /// Ordinal of the device.
        device: u32,
        /// From the question.
        ticket: u32,
        /// Why.
        reason: NotGrantedReason,
    },
    /// Asks this process to have its pools, and the memory of its graphs, give back what they keep.
    /// The guard does so at a later call of the driver and does not answer: what was given back is
    /// seen in the usage page.
    ///
    /// It came after version 1 and changes nothing of it: guards that do not know it ignore it.
    Trim {
        /// Ordinal of the device.
        device: u32,
    },
}

const HELLO: u16 = 1;
const GRANT: u16 = 2;
const REFUSED: u16 = 3;
const STRENGTH: u16 = 4;
const WELCOME: u16 = 101;
const DENIED: u16 = 102;
const GRANTED: u16 = 103;
const NOT_GRANTED: u16 = 104;
const TRIM: u16 = 105;

impl ToAgent {
    /// The frame and its length.
    #[must_use]
    pub fn encode(&self) -> ([u8; FRAME], usize) {
        let mut writer;
        match *self {
            Self::Hello(Hello { versions, slot, ref guard_version }) => {
                writer = Writer::new(HELLO);
                writer.put(&versions.oldest.to_le_bytes());
                writer.put(&versions.newest.to_le_bytes());
                writer.put(&slot.to_le_bytes());
                writer.put(guard_version);
            }
            Self::Grant { device, ticket, wanted_total_units, wait_milliseconds } => {
                writer = Writer::new(GRANT);
                writer.put(&device.to_le_bytes());
                writer.put(&ticket.to_le_bytes());
                writer.put(&wanted_total_units.to_le_bytes());
                writer.put(&wait_milliseconds.to_le_bytes());
            }
            Self::Refused { device, bytes, reason } => {
                writer = Writer::new(REFUSED);
                writer.put(&device.to_le_bytes());
                writer.put(&bytes.to_le_bytes());
                writer.put(&reason.number());
            }
            Self::Strength { flags } => {
                writer = Writer::new(STRENGTH);
                writer.put(&flags.to_le_bytes());
            }
        }
        writer.finish()
    }

    /// Reads a packet.
    pub fn decode(packet: &[u8]) -> Result<Self, Malformed> {
        let (kind, mut reader) = Reader::open(packet)?;
        Ok(match kind {
            HELLO => Self::Hello(Hello {
                versions: Versions { oldest: reader.u32()?, newest: reader.u32()? },
                slot: reader.u32()?,
                guard_version: reader.take()?,
            }),
            GRANT => Self::Grant {
                device: reader.u32()?,
                ticket: reader.u32()?,
                wanted_total_units: reader.u64()?,
                wait_milliseconds: reader.u32()?,
            },
            REFUSED => Self::Refused {
                device: reader.u32()?,
                bytes: reader.u64()?,
                reason: reader.one_of(RefusedReason::ALL)?,
            },
            STRENGTH => Self::Strength { flags: reader.u32()? },
            other => return Err(Malformed::Kind(other)),
        })
    }
}

impl ToGuard {
    /// The frame and its length.
    #[must_use]
    pub fn encode(&self) -> ([u8; FRAME], usize) {
        let mut writer;
        match *self {
            Self::Welcome { abi, slot, devices, ref pod_uid } => {
                writer = Writer::new(WELCOME);
                writer.put(&abi.to_le_bytes());
                writer.put(&slot.to_le_bytes());
                writer.put(&devices.to_le_bytes());
                writer.put(pod_uid);
            }
            Self::Denied { reason } => {
                writer = Writer::new(DENIED);
                writer.put(&reason.number());
            }
            Self::Granted { device, ticket, granted_units } => {
                writer = Writer::new(GRANTED);
                writer.put(&device.to_le_bytes());
                writer.put(&ticket.to_le_bytes());
                writer.put(&granted_units.to_le_bytes());
            }
            Self::NotGranted { device, ticket, reason } => {
                writer = Writer::new(NOT_GRANTED);
                writer.put(&device.to_le_bytes());
                writer.put(&ticket.to_le_bytes());
                writer.put(&reason.number());
            }
            Self::Trim { device } => {
                writer = Writer::new(TRIM);
                writer.put(&device.to_le_bytes());
            }
        }
        writer.finish()
    }

    /// Reads a packet.
    pub fn decode(packet: &[u8]) -> Result<Self, Malformed> {
        let (kind, mut reader) = Reader::open(packet)?;
        Ok(match kind {
            WELCOME => Self::Welcome {
                abi: reader.u32()?,
                slot: reader.u32()?,
                devices: reader.u32()?,
                pod_uid: reader.take()?,
            },
            DENIED => Self::Denied { reason: reader.one_of(DeniedReason::ALL)? },
            GRANTED => {
                Self::Granted { device: reader.u32()?, ticket: reader.u32()?, granted_units: reader.u64()? }
            }
            NOT_GRANTED => Self::NotGranted {
                device: reader.u32()?,
                ticket: reader.u32()?,
                reason: reader.one_of(NotGrantedReason::ALL)?,
            },
            TRIM => Self::Trim { device: reader.u32()? },
            other => return Err(Malformed::Kind(other)),
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn to_agent() -> impl Strategy<Value = ToAgent> {
        prop_oneof![
            any::<(u32, u32, u32, [u8; 16])>().prop_map(|(oldest, newest, slot, guard_version)| {
                ToAgent::Hello(Hello { versions: Versions { oldest, newest }, slot, guard_version })
            }),
            any::<(u32, u32, u64, u32)>().prop_map(
                |(device, ticket, wanted_total_units, wait_milliseconds)| ToAgent::Grant {
                    device,
                    ticket,
                    wanted_total_units,
                    wait_milliseconds
                }
            ),
            (any::<(u32, u64)>(), prop::sample::select(RefusedReason::ALL))
                .prop_map(|((device, bytes), reason)| ToAgent::Refused { device, bytes, reason }),
            any::<u32>().prop_map(|flags| ToAgent::Strength { flags }),
        ]
    }

    fn to_guard() -> impl Strategy<Value = ToGuard> {
        prop_oneof![
            any::<(u32, u32, u32, [u8; 32], [u8; 8])>().prop_map(|(abi, slot, devices, start, end)| {
                let mut pod_uid = [0; 40];
                pod_uid[..32].copy_from_slice(&start);
                pod_uid[32..].copy_from_slice(&end);
                ToGuard::Welcome { abi, slot, devices, pod_uid }
            }),
            prop::sample::select(DeniedReason::ALL).prop_map(|reason| ToGuard::Denied { reason }),
            any::<(u32, u32, u64)>().prop_map(|(device, ticket, granted_units)| ToGuard::Granted {
                device,
                ticket,
                granted_units
            }),
            (any::<(u32, u32)>(), prop::sample::select(NotGrantedReason::ALL))
                .prop_map(|((device, ticket), reason)| ToGuard::NotGranted { device, ticket, reason }),
            any::<u32>().prop_map(|device| ToGuard::Trim { device }),
        ]
    }

    proptest! {
        #[test]
        fn what_a_guard_says_arrives(message in to_agent()) {
            let (frame, length) = message.encode();
            prop_assert_eq!(ToAgent::decode(&frame[..length]), Ok(message));
            prop_assert!(ToGuard::decode(&frame[..length]).is_err());
        }

        #[test]
        fn what_the_agent_says_arrives(message in to_guard()) {
            let (frame, length) = message.encode();
            prop_assert_eq!(ToGuard::decode(&frame[..length]), Ok(message));
            prop_assert!(ToAgent::decode(&frame[..length]).is_err());
        }

        #[test]
        fn a_frame_that_is_cut_short_is_refused(message in to_agent(), cut in any::<prop::sample::Index>()) {
            let (frame, length) = message.encode();
            prop_assert!(ToAgent::decode(&frame[..cut.index(length)]).is_err());
        }

        #[test]
        fn what_a_newer_peer_appends_is_ignored(message in to_guard(), more in 1_usize..64) {
            let (mut frame, length) = message.encode();
            let longer = length + more;
            frame[length..longer].fill(0xa5);
            frame[6..8].copy_from_slice(&u16::try_from(longer).unwrap().to_le_bytes());
            prop_assert_eq!(ToGuard::decode(&frame[..longer]), Ok(message));
        }
    }

    #[test]
    fn the_first_frames_never_change() {
        let hello = ToAgent::Hello(Hello {
            versions: Versions { oldest: 1, newest: 2 },
            slot: 3,
            guard_version: *b"1.2.3\0\0\0\0\0\0\0\0\0\0\0",
        });
        let (frame, length) = hello.encode();
        let mut expected = Vec::from(*b"HWGD\x01\x00\x24\x00\x01\0\0\0\x02\0\0\0\x03\0\0\0");
        expected.extend(b"1.2.3\0\0\0\0\0\0\0\0\0\0\0");
        assert_eq!(frame[..length], expected);
        let (frame, length) = ToGuard::Denied { reason: DeniedReason::Abi }.encode();
        assert_eq!(frame[..length], *b"HWGD\x66\x00\x0c\x00\x01\0\0\0");
    }

    #[test]
    fn reasons_are_numbered_in_order() {
        for (index, reason) in (1..).zip(RefusedReason::ALL) {
            assert_eq!(*reason as u32, index);
        }
        for (index, reason) in (1..).zip(DeniedReason::ALL) {
            assert_eq!(*reason as u32, index);
        }
        for (index, reason) in (1..).zip(NotGrantedReason::ALL) {
            assert_eq!(*reason as u32, index);
        }
    }

    #[test]
    fn bad_frames_are_told_apart() {
        let (frame, length) = ToAgent::Strength { flags: 1 }.encode();
        let changed = |at: usize, to: u8| {
            let mut frame = frame;
            frame[at] = to;
            ToAgent::decode(&frame[..length])
        };
        assert_eq!(ToAgent::decode(&[]), Err(Malformed::Short));
        assert_eq!(changed(0, 0), Err(Malformed::Magic));
        assert_eq!(changed(5, 9), Err(Malformed::Kind(0x0904)));
        assert_eq!(changed(6, 200), Err(Malformed::Length));
        let (mut frame, length) =
            ToAgent::Refused { device: 0, bytes: 0, reason: RefusedReason::Invalid }.encode();
        for unknown in [0, 6, 255] {
            frame[length - 4] = unknown;
            assert_eq!(ToAgent::decode(&frame[..length]), Err(Malformed::Value));
        }
    }
}
