//! `Park`: whether the GPU memory of a pod may be moved to the host, and who is moved back first.

use std::{cmp::Reverse, fmt};

use highwater_crds::{ByteSize, Level};

use crate::time::Millis;

/// What a checkpoint takes on the host beside the bytes of the image: this part of it, a tenth.
const HOST_EXTRA: u64 = 10;
/// What must stay free on the device beside a restored image: the larger of this
const MARGIN: u64 = 256 * ByteSize::MI;
/// and this part of the image.
const MARGIN_PART: u64 = 50;
/// A restore that was refused is tried again after the first, doubled each time up to the second, in
/// milliseconds.
const BACK_OFF: (u64, u64) = (5_000, 300_000);

/// What is known of a pod on a device that might be parked.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[allow(clippy::struct_excessive_bools)] // independent facts
pub struct Facts {
    /// It opted in by its label.
    pub opted_in: bool,
    /// Level of the breaker that asks.
    pub level: Level,
    /// A keeper answers and can park on this node.
    pub able: bool,
    /// Its memory is parked, or is being moved.
    pub parked: bool,
    /// Bytes of its processes on the device.
    pub image: Option<u64>,
    /// Its processes are known to use other devices as well.
    pub other_devices: bool,
    /// It is known to hold memory that was lent to it, or that it imported.
    pub imported: bool,
    /// It is known to have given memory to other processes.
    pub exported: bool,
    /// It is known to use managed memory.
    pub managed: bool,
    /// Room on the host.
    pub host: Host,
}

/// Room on the host, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Host {
    /// What the pod's memory cgroup may still take. `None`: it has no limit.
    pub cgroup_room: Option<u64>,
    /// `MemAvailable` of the node. `None`: not known.
    pub available: Option<u64>,
    /// What parked pods take on the node already, those that are being parked included.
    pub parked: u64,
    /// The most that parked pods may take (`maxHostSize`).
    pub most: Option<u64>,
}

/// Why a pod is not parked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// It did not opt in.
    NotOptedIn,
    /// Nothing can be parked on this node.
    Unable,
    /// Moving memory takes longer than an emergency allows.
    Emergency,
    /// It is parked already.
    Parked,
    /// What it holds is not known, or nothing.
    NothingToMove,
    /// It uses several devices.
    SeveralDevices,
    /// It holds memory that is not its own.
    Imported,
    /// Others use its memory.
    Exported,
    /// It uses managed memory.
    Managed,
    /// The host has no room for it.
    NoHostRoom {
        /// Bytes that it takes there.
        needs: u64,
        /// Bytes that there are.
        room: u64,
    },
    /// Parked pods would take more than the policy allows.
    HostSize {
        /// Bytes that all would take.
        needs: u64,
        /// Bytes that are allowed.
        most: u64,
    },
}

impl Refusal {
    /// The reason in CamelCase, for a metric or a decision.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::NotOptedIn => "NotOptedIn",
            Self::Unable => "ParkUnsupported",
            Self::Emergency => "TooSlow",
            Self::Parked => "AlreadyParked",
            Self::NothingToMove => "NothingToMove",
            Self::SeveralDevices => "SeveralDevices",
            Self::Imported => "ImportedMemory",
            Self::Exported => "ExportedMemory",
            Self::Managed => "ManagedMemory",
            Self::NoHostRoom { .. } => "NoHostRoom",
            Self::HostSize { .. } => "HostSize",
        }
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let size = |bytes: &u64| ByteSize(*bytes).rounded();
        f.write_str(match self {
            Self::NotOptedIn => "the pod did not opt in",
            Self::Unable => "nothing can be parked on this node",
            Self::Emergency => "too slow for an emergency",
            Self::Parked => "it is parked already",
            Self::NothingToMove => "what it holds is not known, or nothing",
            Self::SeveralDevices => "its processes use several devices",
            Self::Imported => "it holds memory that it imported",
            Self::Exported => "other processes use its memory",
            Self::Managed => "it uses managed memory",
            Self::NoHostRoom { needs, room } => {
                return write!(f, "needs {} on the host, which has {}", size(needs), size(room));
            }
            Self::HostSize { needs, most } => {
                return write!(
                    f,
                    "parked pods would take {} on the host, allowed are {}",
                    size(needs),
                    size(most)
                );
            }
        })
    }
}

/// The bytes that parking frees on the device, or why it is not done. All of it is to be asked just
/// before it is begun.
pub fn may_park(facts: &Facts) -> Result<u64, Refusal> {
    let image = facts.image.filter(|bytes| *bytes > 0);
    let refusals = [
        (!facts.opted_in, Refusal::NotOptedIn),
        (!facts.able, Refusal::Unable),
        (facts.parked, Refusal::Parked),
        (facts.level == Level::Emergency, Refusal::Emergency),
        (image.is_none(), Refusal::NothingToMove),
        (facts.other_devices, Refusal::SeveralDevices),
        (facts.imported, Refusal::Imported),
        (facts.exported, Refusal::Exported),
        (facts.managed, Refusal::Managed),
    ];
    if let Some((_, refusal)) = refusals.into_iter().find(|(holds, _)| *holds) {
        return Err(refusal);
    }
    let image = image.unwrap_or(0);
    let needs = host_bytes(image);
    // A limit of the pod is no promise of the node: the lesser counts. Where neither is known there
    // is no room.
    let room = [facts.host.cgroup_room, facts.host.available].into_iter().flatten().min().unwrap_or(0);
    if room < needs {
        return Err(Refusal::NoHostRoom { needs, room });
    }
    let all = facts.host.parked.saturating_add(needs);
    match facts.host.most {
        Some(most) if all > most => Err(Refusal::HostSize { needs: all, most }),
        _ => Ok(image),
    }
}

/// What an image takes on the host, in bytes.
pub const fn host_bytes(image: u64) -> u64 {
    image.saturating_add(image.div_ceil(HOST_EXTRA))
}

/// What must be free on the device before an image is restored, in bytes.
pub const fn restore_bytes(image: u64) -> u64 {
    let share = image / MARGIN_PART;
    image.saturating_add(if share > MARGIN { share } else { MARGIN })
}

/// A pod whose memory is parked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Parked<'a> {
    /// UID of the pod.
    pub uid: &'a str,
    /// Its priority.
    pub priority: i32,
    /// Since when it has been parked, in milliseconds of whatever clock all have in common.
    pub since: i64,
    /// Bytes that it takes on the device.
    pub image: u64,
    /// Its refused restores.
    pub refused: Refused,
}

/// The restores of a pod that were refused.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Refused {
    /// How many, one after the other.
    pub times: u32,
    /// When the last was.
    pub last: Millis,
}

impl Refused {
    /// One more.
    #[must_use]
    pub const fn again(self, now: Millis) -> Self {
        Self { times: self.times.saturating_add(1), last: now }
    }

    /// Whether it is too early to try again.
    pub fn waits(self, now: Millis) -> bool {
        let (least, most) = BACK_OFF;
        let doubled = self.times.checked_sub(1).map(|times| least.checked_shl(times).unwrap_or(most));
        // Bits that were shifted out make a small number of a large one.
        let pause = doubled.map(|pause| if self.times > 16 { most } else { pause.min(most) });
        pause.is_some_and(|pause| now.since(self.last) < pause)
    }
}

/// Whose memory is moved back next, by its place, or `None`: in order of priority, then the one that
/// was parked first. `free` are the bytes of the device that are free and owed to nobody else. Where
/// there is no room for the first, nobody else takes what there is; one that waits after a refusal
/// lets others pass. At any level but Normal nobody is moved back.
pub fn next_restore(parked: &[Parked<'_>], free: Option<u64>, level: Level, now: Millis) -> Option<usize> {
    if level != Level::Normal {
        return None;
    }
    let waiting = parked.iter().enumerate().filter(|(_, pod)| !pod.refused.waits(now));
    let (place, first) = waiting.min_by_key(|(_, pod)| (Reverse(pod.priority), pod.since, pod.uid))?;
    (free? >= restore_bytes(first.image)).then_some(place)
}

/// Whether a pod has been parked for so long that it is restarted instead.
pub fn is_overdue(parked_for_milliseconds: u64, max_minutes: i32) -> bool {
    parked_for_milliseconds >= u64::try_from(max_minutes).unwrap_or(0).saturating_mul(60_000)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const GI: u64 = ByteSize::GI;

    fn facts() -> Facts {
        Facts {
            opted_in: true,
            able: true,
            image: Some(20 * GI),
            host: Host { cgroup_room: Some(30 * GI), available: Some(200 * GI), parked: 0, most: None },
            ..Facts::default()
        }
    }

    #[test]
    fn every_precondition_is_asked() {
        assert_eq!(may_park(&facts()), Ok(20 * GI));
        let host = facts().host;
        for (facts, reason) in [
            (Facts { opted_in: false, ..facts() }, "NotOptedIn"),
            (Facts { able: false, ..facts() }, "ParkUnsupported"),
            (Facts { level: Level::Emergency, ..facts() }, "TooSlow"),
            (Facts { parked: true, ..facts() }, "AlreadyParked"),
            (Facts { image: None, ..facts() }, "NothingToMove"),
            (Facts { image: Some(0), ..facts() }, "NothingToMove"),
            (Facts { other_devices: true, ..facts() }, "SeveralDevices"),
            (Facts { imported: true, ..facts() }, "ImportedMemory"),
            (Facts { exported: true, ..facts() }, "ExportedMemory"),
            (Facts { managed: true, ..facts() }, "ManagedMemory"),
            (Facts { host: Host { cgroup_room: Some(21 * GI), ..host }, ..facts() }, "NoHostRoom"),
            (Facts { host: Host { available: Some(21 * GI), ..host }, ..facts() }, "NoHostRoom"),
            (Facts { host: Host { cgroup_room: None, available: None, ..host }, ..facts() }, "NoHostRoom"),
            (Facts { host: Host { most: Some(40 * GI), parked: 20 * GI, ..host }, ..facts() }, "HostSize"),
        ] {
            let refusal = may_park(&facts).unwrap_err();
            assert_eq!(refusal.as_str(), reason);
            assert!(!refusal.to_string().is_empty());
        }
        let without_limit = Host { cgroup_room: None, available: Some(22 * GI), ..host };
        assert_eq!(may_park(&Facts { host: without_limit, ..facts() }), Ok(20 * GI));
    }

    fn parked(uid: &str, priority: i32, since: i64, gib: u64) -> Parked<'_> {
        Parked { uid, priority, since, image: gib * GI, refused: Refused::default() }
    }

    #[test]
    fn the_highest_priority_returns_first_and_nobody_takes_its_room() {
        let all = [parked("old", 0, 1, 2), parked("high", 5, 9, 20), parked("young", 0, 8, 2)];
        let next = |free: u64| next_restore(&all, Some(free * GI), Level::Normal, Millis(0));
        assert_eq!(next(21), Some(1));
        assert_eq!(next(10), None, "there is room for the others, which would take it away");
        assert_eq!(next_restore(&all[..1], Some(3 * GI), Level::Normal, Millis(0)), Some(0));
        let equal = [parked("young", 0, 8, 2), parked("old", 0, 1, 2)];
        assert_eq!(next_restore(&equal, Some(3 * GI), Level::Normal, Millis(0)), Some(1));
        for level in [Level::Warning, Level::Critical, Level::Emergency] {
            assert_eq!(next_restore(&all, Some(100 * GI), level, Millis(0)), None);
        }
        assert_eq!(next_restore(&all, None, Level::Normal, Millis(0)), None);
    }

    #[test]
    fn a_refused_restore_waits_longer_each_time_and_lets_others_pass() {
        let mut refused = Refused::default();
        assert!(!refused.waits(Millis(0)));
        let mut pauses = Vec::new();
        for _ in 0..9 {
            refused = refused.again(Millis(0));
            pauses.push((1..400).find(|s| !refused.waits(Millis(s * 1000))).unwrap());
        }
        assert_eq!(pauses, [5, 10, 20, 40, 80, 160, 300, 300, 300]);
        let ever = Refused { times: u32::MAX, last: Millis(0) };
        assert!(ever.waits(Millis(299_999)) && !ever.waits(Millis(300_000)));

        let first = Parked { refused: Refused::default().again(Millis(0)), ..parked("high", 5, 1, 2) };
        let all = [first, parked("low", 0, 2, 2)];
        assert_eq!(next_restore(&all, Some(3 * GI), Level::Normal, Millis(100)), Some(1));
        assert_eq!(next_restore(&all, Some(3 * GI), Level::Normal, Millis(5_000)), Some(0));
    }

    #[test]
    fn one_that_cannot_return_is_overdue_at_last() {
        assert!(!is_overdue(59 * 60_000, 60));
        assert!(is_overdue(60 * 60_000, 60));
    }

    proptest! {
        #[test]
        fn sizes_never_wrap_and_never_promise_too_little(image in any::<u64>()) {
            let needs = host_bytes(image);
            prop_assert!(u128::from(needs) >= (u128::from(image) * 110 / 100).min(u128::from(u64::MAX)));
            prop_assert!(restore_bytes(image) > image || image > u64::MAX - MARGIN);
        }
    }
}
