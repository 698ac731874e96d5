//! How the agent speaks to the keeper: requests, replies, the frames that carry them, and the
//! agent's end.
//!
//! A frame is one packet of a `SOCK_SEQPACKET` unix socket: JSON of at most [`MOST_BYTES`], with
//! at most [`MOST_DESCRIPTORS`] descriptors beside it. Each request has a number, and its reply
//! has the same; replies come in the order in which the work was done, so that a long
//! reservation on one device delays nothing else.

#![allow(dead_code, unused_imports, reason = "the agent, the keeper and the tests each use a part")]

mod client;
mod frame;
mod park;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

pub(crate) use client::{Keeper, KeeperError};
pub(crate) use frame::{Frame, FrameError, Socket, receive_now, send_now};
pub(crate) use park::{
    LONGEST_MESSAGE, MOST_PARKS, MOST_PROCESSES, Moved, Park, ParkAsk, ParkState, Parking, Process,
};

/// Version of the protocol. A keeper answers a client of its own version only.
pub(crate) const VERSION: u32 = 1;
/// Longest text of a frame, in bytes.
pub(crate) const MOST_BYTES: usize = 64 << 10;
/// Most descriptors beside a frame: the kernel takes 253.
pub(crate) const MOST_DESCRIPTORS: usize = 250;
/// Most descriptors that are stored under one key.
pub(crate) const MOST_STORED: usize = 8;
/// Longest key of a stored set of descriptors.
pub(crate) const LONGEST_KEY: usize = 128;
/// Most keys that one [`Ask::Keys`] is answered with.
pub(crate) const KEYS_A_PAGE: usize = 256;

/// A request, with the number that its reply carries.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Request {
    /// The number; unique among the requests of a connection that are not answered yet.
    #[serde(default)]
    pub(crate) id: u64,
    /// What is asked.
    #[serde(flatten)]
    pub(crate) ask: Ask,
}

/// What may be asked. Sizes are bytes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", rename_all_fields = "camelCase")]
pub(crate) enum Ask {
    /// The first request of a connection.
    Hello {
        /// The client's [`VERSION`].
        version: u32,
        /// What the client is.
        #[serde(default)]
        role: Role,
    },
    /// What the keeper holds. Answered with [`Answer::Status`].
    Status {},
    /// Takes memory of a device until `bytes` more are held, but never so that less than
    /// `keep_free` stays free. Answered with [`Answer::Reserved`], also when it got less.
    /// 0 bytes start the worker only, so that the next reservation is quick.
    Reserve {
        /// UUID of the device.
        device: String,
        /// How much more to hold.
        bytes: u64,
        /// How much stays free.
        keep_free: u64,
    },
    /// Gives back at least `bytes`, or all there is. Ends a reservation on this device that is
    /// under way. Answered with [`Answer::Released`].
    Release {
        /// UUID of the device.
        device: String,
        /// How much to give back.
        bytes: u64,
        /// Where chunks do not fit exactly: take what was given back beyond `bytes` again,
        /// after the answer, with this much left free. `None`: do not.
        #[serde(default)]
        keep_free: Option<u64>,
    },
    /// On: closes every handle on every device, and holds nothing until off.
    StandDown {
        /// Whether to stand down.
        on: bool,
    },
    /// Stores the descriptors beside the frame, in place of those stored under the key.
    Put {
        /// At most [`LONGEST_KEY`] letters, digits and `-._:/`.
        key: String,
    },
    /// Answered with [`Answer::Done`] and the descriptors beside it.
    Get {
        /// The key.
        key: String,
    },
    /// Forgets the descriptors. Fine where there are none.
    Drop {
        /// The key.
        key: String,
    },
    /// The stored keys in order, at most [`KEYS_A_PAGE`] that come after `after`.
    Keys {
        /// The last key of the page before.
        #[serde(default)]
        after: Option<String>,
    },
    /// Moves the memory of a pod's processes to the host: of all of them, or of none. Answered with
    /// [`Answer::Moved`] when that is done, which takes about a minute for 100 GiB.
    Park(ParkAsk),
    /// Moves a parked pod's memory back. Answered like [`Ask::Park`]. Fine where nothing is parked.
    Restore {
        /// UID of the pod.
        pod: String,
        /// UUID of the device.
        device: String,
    },
    /// A successor asks for everything. Answered with any number of [`Answer::Batch`].
    HandOver {},
    /// The successor has everything and answers for it from now on.
    Done {},
}

/// What a client is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) enum Role {
    /// The node's agent. The newest one counts: the one before is told so and cut off.
    #[default]
    Agent,
    /// A keeper that wants to take over, now or when this one ends.
    Successor,
    /// Asks for the status only.
    Probe,
}

/// The reply to the request of the same number.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Reply {
    /// The request's number; 0 where no request could be read, and of what was not asked for.
    #[serde(default)]
    pub(crate) id: u64,
    /// The result.
    #[serde(flatten)]
    pub(crate) result: Outcome,
}

/// How a request ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) enum Outcome {
    /// As asked.
    Ok(Answer),
    /// Not done.
    Error(Refusal),
}

/// What a request that was done is answered with.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", rename_all_fields = "camelCase")]
pub(crate) enum Answer {
    /// Nothing more to say.
    Done {},
    /// To [`Ask::Status`].
    Status(Status),
    /// To [`Ask::Reserve`].
    Reserved(Reserved),
    /// To [`Ask::Release`].
    Released(Released),
    /// To [`Ask::Park`] and [`Ask::Restore`].
    Moved(Moved),
    /// To [`Ask::Keys`].
    Keys {
        /// The keys, in order.
        keys: Vec<String>,
    },
    /// Some of what is handed over, with its descriptors beside the frame.
    Batch(Batch),
    /// Not asked for: this keeper ends; a successor on this connection should ask to hand over.
    TakeOver {},
}

/// What the keeper holds.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Status {
    /// Version of the keeper's program.
    pub(crate) version: String,
    /// What it is at.
    #[serde(default)]
    pub(crate) phase: Phase,
    /// Whether it stands down.
    pub(crate) stand_down: bool,
    /// Whether an older keeper that did not end may still hold duplicates of what is handed
    /// over: then releases free nothing.
    pub(crate) predecessor: bool,
    /// How many keepers stand by to take over when this one ends.
    #[serde(default)]
    pub(crate) standing_by: usize,
    /// How many keys are stored.
    pub(crate) stored: usize,
    /// The devices on which something was held, or tried, in the order of their UUIDs.
    pub(crate) devices: Vec<DeviceStatus>,
    /// What is parked. `None`: the keeper is older than parking, and must not be asked for it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) parking: Option<Parking>,
}

/// What a keeper is at.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) enum Phase {
    /// It holds and serves.
    #[default]
    Holding,
    /// It starts, or takes over from another.
    Starting,
    /// It has handed everything over, and is there in case the other ends.
    StandingBy,
    /// It should hold and serve, and does not move.
    Stuck,
}

impl Status {
    /// A device.
    pub(crate) fn device(&self, uuid: &str) -> Option<&DeviceStatus> {
        self.devices.iter().find(|device| device.uuid == uuid)
    }
}

/// What is held of a device.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct DeviceStatus {
    /// UUID of the device.
    pub(crate) uuid: String,
    /// Bytes held.
    pub(crate) ballast_bytes: u64,
    /// How many chunks of which size, in MiB.
    #[serde(with = "sizes")]
    pub(crate) chunks: BTreeMap<u64, u64>,
    /// Whether something is being reserved or given back.
    pub(crate) busy: bool,
    /// Process ID of the worker as the keeper sees it, while there is one.
    pub(crate) worker: Option<u32>,
    /// Why the last reservation fell short, if the driver or the worker was the reason.
    pub(crate) last_error: Option<String>,
}

/// A map by numbers. Its keys are texts in JSON, and flattened messages do not read them back.
mod sizes {
    use std::collections::BTreeMap;

    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    pub(super) fn serialize<S: Serializer>(map: &BTreeMap<u64, u64>, to: S) -> Result<S::Ok, S::Error> {
        to.collect_map(map.iter().map(|(size, count)| (size.to_string(), count)))
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<BTreeMap<u64, u64>, D::Error> {
        let map = BTreeMap::<String, u64>::deserialize(from)?;
        let number = |(size, count): (String, u64)| Ok((size.parse().map_err(D::Error::custom)?, count));
        map.into_iter().map(number).collect()
    }
}

/// What a reservation came to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Reserved {
    /// Bytes taken.
    pub(crate) bytes: u64,
    /// Bytes held of the device now.
    pub(crate) ballast_bytes: u64,
    /// Why it ended.
    pub(crate) end: End,
    /// What the driver said of it, in words, unless it was complete.
    #[serde(default)]
    pub(crate) message: Option<String>,
    /// Bytes that were free at the end, where the driver said.
    #[serde(default)]
    pub(crate) free_bytes: Option<u64>,
}

/// Why a reservation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) enum End {
    /// All was taken, to the driver's granularity.
    Complete,
    /// More would have left less free than was to be kept.
    KeepFree,
    /// The driver refused a chunk. It is not tried again.
    Refused,
    /// A release, a hand-over or standing down came in between.
    Interrupted,
    /// The driver could not be used, or the worker died. What was handed over before counts.
    Failed,
}

/// What was given back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Released {
    /// Bytes given back: free on the device by now, unless a predecessor holds duplicates.
    pub(crate) bytes: u64,
    /// Bytes held of the device now.
    pub(crate) ballast_bytes: u64,
}

/// Some of what is handed over.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Batch {
    /// Chunks of a device: one descriptor each.
    #[serde(default)]
    pub(crate) device: Option<String>,
    /// Their sizes, in the order of the descriptors.
    #[serde(default)]
    pub(crate) sizes: Vec<u64>,
    /// Or the descriptors stored under a key.
    #[serde(default)]
    pub(crate) key: Option<String>,
    /// Or the end of it all.
    #[serde(default)]
    pub(crate) last: Option<Last>,
}

/// The end of a hand-over.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Last {
    /// How many descriptors there were before this.
    pub(crate) descriptors: usize,
    /// Whether the keeper stands down.
    pub(crate) stand_down: bool,
}

/// Why a request was not done.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(rename_all = "camelCase")]
#[error("{message}")]
pub(crate) struct Refusal {
    /// The reason, for programs.
    pub(crate) reason: Reason,
    /// The reason, for people.
    pub(crate) message: String,
}

impl Refusal {
    /// A refusal.
    pub(crate) fn new(reason: Reason, message: impl Into<String>) -> Self {
        Self { reason, message: message.into() }
    }
}

/// Why a request was not done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[non_exhaustive]
pub(crate) enum Reason {
    /// Not a request, or one with values that make no sense.
    Malformed,
    /// Of another [`VERSION`].
    Version,
    /// Not a request for a client of this role.
    NotAllowed,
    /// The device is being reserved from already, or too much is under way on this connection.
    Busy,
    /// The keeper stands down.
    StoodDown,
    /// A successor is taking over: connect again.
    HandingOver,
    /// A newer client took this one's place.
    Displaced,
    /// Nothing is stored under the key; or a process to be parked is not there, or is not to be
    /// seen by the keeper.
    NotFound,
    /// The store, the table of devices, or that of parks is full.
    Full,
    /// Nothing can be parked on this node.
    Unable,
    /// The kernel did not take a descriptor back in time: the device is stuck.
    Stuck,
    /// A reason that this version does not know.
    #[serde(other)]
    Other,
}

/// Whether the text may be a key of the store.
pub(crate) fn is_key(text: &str) -> bool {
    (1..=LONGEST_KEY).contains(&text.len())
        && text.bytes().all(|c| c.is_ascii_alphanumeric() || b"-._:/".contains(&c))
}

/// Whether the text may be the UUID of a device.
pub(crate) fn is_uuid(text: &str) -> bool {
    (5..=96).contains(&text.len())
        && (text.starts_with("GPU-") || text.starts_with("MIG-"))
        && text.bytes().all(|c| c.is_ascii_alphanumeric() || b"-/".contains(&c))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(value: &impl Serialize) -> String {
        serde_json::to_string(value).unwrap()
    }

    #[test]
    fn requests_read_as_documented() {
        let request = |ask| Request { id: 7, ask };
        for (written, meant) in [
            (r#"{"id":7,"hello":{"version":1}}"#, Ask::Hello { version: 1, role: Role::Agent }),
            (r#"{"id":7,"status":{}}"#, Ask::Status {}),
            (
                r#"{"id":7,"reserve":{"device":"GPU-1","bytes":5,"keepFree":6}}"#,
                Ask::Reserve { device: "GPU-1".into(), bytes: 5, keep_free: 6 },
            ),
            (
                r#"{"id":7,"release":{"device":"GPU-1","bytes":5}}"#,
                Ask::Release { device: "GPU-1".into(), bytes: 5, keep_free: None },
            ),
            (r#"{"id":7,"standDown":{"on":true}}"#, Ask::StandDown { on: true }),
            (r#"{"id":7,"put":{"key":"k"}}"#, Ask::Put { key: "k".into() }),
            (
                r#"{"id":7,"park":{"pod":"p","device":"GPU-1","processes":[{"pid":5,"started":6}],"bytes":7,"lockMilliseconds":8}}"#,
                Ask::Park(ParkAsk {
                    pod: "p".into(),
                    device: "GPU-1".into(),
                    processes: vec![Process { pid: 5, started: 6 }],
                    bytes: 7,
                    lock_milliseconds: 8,
                }),
            ),
            (
                r#"{"id":7,"restore":{"pod":"p","device":"GPU-1"}}"#,
                Ask::Restore { pod: "p".into(), device: "GPU-1".into() },
            ),
            (r#"{"id":7,"handOver":{}}"#, Ask::HandOver {}),
        ] {
            assert_eq!(serde_json::from_str::<Request>(written).unwrap(), request(meant), "{written}");
        }
        assert_eq!(serde_json::from_str::<Request>(r#"{"status":{}}"#).unwrap().id, 0);
        for garbage in
            ["", "null", "{}", r#"{"id":7}"#, r#"{"id":-1,"status":{}}"#, r#"{"reserve":{"device":"GPU-1"}}"#]
        {
            assert!(serde_json::from_str::<Request>(garbage).is_err(), "{garbage}");
        }
    }

    #[test]
    fn replies_survive_the_way() {
        let status = Status {
            devices: vec![DeviceStatus {
                uuid: "GPU-1".into(),
                chunks: BTreeMap::from([(1024, 2), (2, 1)]),
                ..DeviceStatus::default()
            }],
            parking: Some(Parking {
                unable: None,
                parks: vec![Park {
                    pod: "p".into(),
                    device: "GPU-1".into(),
                    bytes: 1,
                    state: ParkState::Parked,
                    since: 2,
                    message: None,
                }],
            }),
            ..Status::default()
        };
        let moved = Moved { state: ParkState::Running, message: Some("m".into()), milliseconds: 1 };
        for result in [
            Outcome::Ok(Answer::Done {}),
            Outcome::Ok(Answer::Moved(moved)),
            Outcome::Ok(Answer::Status(status)),
            Outcome::Ok(Answer::Released(Released { bytes: 1, ballast_bytes: 2 })),
            Outcome::Ok(Answer::Batch(Batch { last: Some(Last::default()), ..Batch::default() })),
            Outcome::Error(Refusal::new(Reason::Busy, "busy")),
        ] {
            let reply = Reply { id: 3, result };
            assert_eq!(serde_json::from_str::<Reply>(&text(&reply)).unwrap(), reply);
        }
        let unknown = r#"{"id":1,"error":{"reason":"newer","message":"m"}}"#;
        let reply = serde_json::from_str::<Reply>(unknown).unwrap();
        assert_eq!(reply.result, Outcome::Error(Refusal::new(Reason::Other, "m")));
        assert_eq!(
            text(&Reply { id: 1, result: Outcome::Ok(Answer::Done {}) }),
            r#"{"id":1,"ok":{"done":{}}}"#
        );
    }

    #[test]
    fn names_are_checked() {
        assert!(is_key("5f0c-11/quota"));
        assert!(!is_key("") && !is_key("a b") && !is_key(&"a".repeat(LONGEST_KEY + 1)));
        assert!(is_uuid("GPU-6c1d") && is_uuid("MIG-GPU-6c1d/7/0"));
        assert!(!is_uuid("GPU-,GPU-") && !is_uuid("0") && !is_uuid("all"));
    }
}
