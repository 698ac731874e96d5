//! Who holds the memory of a device.
//!
//! At every sample of a device:
//!
//! ```text
//! total = driverReserved + pods + foreign + zombie + unexplained + ballast + leased + free
//! ```
//!
//! `unexplained` is what the rest does not add up to; it is signed. A number that the driver does
//! not give is missing here as well, never 0. All arithmetic saturates, and nobody is ever said
//! to hold more than the device has.

use std::sync::Arc;

use highwater_crds::{ByteSize, DriverReserve};

use crate::time::Millis;

/// What the driver says of a device's memory, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Memory {
    /// All of it.
    pub total: Option<u64>,
    /// In use, without what the driver keeps for itself.
    pub used: Option<u64>,
    /// What the driver keeps for itself.
    pub reserved: Option<u64>,
}

/// What one process holds on a device, and on whose behalf.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Charge {
    /// PID on the host.
    pub pid: u32,
    /// Bytes, contexts included. `None` where the driver does not say.
    pub bytes: Option<u64>,
    /// Whose process it is.
    pub holder: Holder,
}

/// Whose process it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Holder {
    /// A container of a pod.
    Container {
        /// UID of the pod, as the kubelet knows it.
        pod: Arc<str>,
        /// ID of the container; absent for what runs in the pod but in none of its containers.
        container: Option<Arc<str>>,
    },
    /// A process of no pod.
    Foreign,
    /// The process has ended, yet the driver lists it.
    Gone,
}

/// One sample of a device.
#[derive(Clone, Copy, Debug)]
pub struct Sample<'a> {
    /// What the driver says of the device.
    pub memory: Memory,
    /// Its processes, each once. `None` where the driver does not list them.
    pub charges: Option<&'a [Charge]>,
    /// Memory and processes were not of the same moment.
    pub torn: bool,
    /// A live process on the device is known to use managed memory, which no list shows.
    pub managed: bool,
    /// What the keeper says that it holds on the device, in bytes. The driver counts it as used and
    /// lists it for nobody, so it is taken for true only as far as the residual covers it.
    pub ballast: u64,
}

/// What one pod holds on a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodUse {
    /// UID of the pod, as the kubelet knows it.
    pub pod: Arc<str>,
    /// All containers together; missing if it is for one of its processes.
    pub bytes: Option<u64>,
    /// Each container by its ID, as in [`Holder::Container`].
    pub containers: Vec<(Option<Arc<str>>, Option<u64>)>,
}

/// Part of a whole, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share {
    /// The part; at most the whole, unless it is what a pod uses of its limit.
    pub used: u64,
    /// The whole.
    pub of: u64,
}

impl Share {
    /// Whether the part is at least so many percent of the whole.
    pub fn at_least(self, percent: i32) -> bool {
        u128::from(self.used) * 100 >= u128::from(self.of) * u128::try_from(percent).unwrap_or(0)
    }

    /// Whether the part is less than so many percent of the whole.
    pub fn below(self, percent: i32) -> bool {
        !self.at_least(percent)
    }

    /// The part in whole percent of the whole, rounded down.
    pub fn percent(self) -> i32 {
        let percent = u128::from(self.used) * 100 / u128::from(self.of.max(1));
        i32::try_from(percent).unwrap_or(i32::MAX)
    }
}

/// The ledger of a device at one sample, in bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ledger {
    /// All memory of the device.
    pub total: Option<u64>,
    /// Set aside for the driver, as far as it is there.
    pub driver_reserved: Option<u64>,
    /// Held by pods.
    pub pods: Option<u64>,
    /// Held by processes of no pod.
    pub foreign: Option<u64>,
    /// Held by nobody that lives.
    pub zombie: Option<u64>,
    /// In use, and explained by none of the above.
    pub unexplained: Option<i64>,
    /// Held back by the reservation pool. Never counts as used.
    pub ballast: u64,
    /// Lent by descriptor. Nothing is lent so far.
    pub leased: u64,
    /// Free.
    pub free: Option<u64>,
    /// The part of `unexplained` that is normal: what the driver charges to nobody, as calibrated
    /// for so many processes.
    pub constant: u64,
    /// Number of processes that the driver lists.
    pub processes: Option<usize>,
    /// What each pod holds, in the order in which its processes were listed.
    pub by_pod: Vec<PodUse>,
    /// What counts as used, of what can be used: without the driver's reserve and what pods
    /// declared.
    pub level: Option<Share>,
}

impl Ledger {
    /// What a pod holds: `Some(0)` if it has no process on the device, `None` if that is not
    /// known.
    pub fn used_by(&self, pod: &str) -> Option<u64> {
        match self.by_pod.iter().find(|held| &*held.pod == pod) {
            Some(held) => held.bytes,
            None => self.processes.map(|_| 0),
        }
    }

    /// Unexplained bytes beyond what is normal: more than the constant and 2 MiB a process.
    pub fn unusual(&self) -> u64 {
        let unexplained = u64::try_from(self.unexplained.unwrap_or(0)).unwrap_or(0);
        let normal = self.constant.saturating_add(noise(self.processes.unwrap_or(0)));
        unexplained.saturating_sub(normal)
    }
}

/// The residual that rounding may leave for so many processes.
fn noise(processes: usize) -> u64 {
    (2 * ByteSize::MI).saturating_mul(u64::try_from(processes.max(1)).unwrap_or(u64::MAX))
}

/// What is remembered of a device from sample to sample.
#[derive(Clone, Debug, Default)]
pub struct Account {
    zombies: Zombies,
}

impl Account {
    /// Accounts for one sample. `reserve` is what policy sets aside for the driver; `declared`
    /// gives the part that a pod preallocates by design.
    pub fn step(
        &mut self,
        sample: Sample<'_>,
        reserve: Option<&DriverReserve>,
        declared: impl Fn(&str) -> u64,
        now: Millis,
    ) -> Ledger {
        let total = sample.memory.total;
        let bound = total.unwrap_or(u64::MAX);
        let mut ledger = Ledger { total, ..Ledger::default() };

        let mut listed_zombie = None;
        if let Some(charges) = sample.charges {
            ledger.processes = Some(charges.len());
            ledger.by_pod = by_pod(charges, bound);
            // Clamped in turn, so that together they are never more than the device.
            let zombie = sum(charges, |h| *h == Holder::Gone).map(|b| b.min(bound));
            let left = bound.saturating_sub(zombie.unwrap_or(0));
            ledger.foreign = sum(charges, |h| *h == Holder::Foreign).map(|b| b.min(left));
            let left = left.saturating_sub(ledger.foreign.unwrap_or(0));
            ledger.pods = sum(charges, |h| matches!(h, Holder::Container { .. })).map(|b| b.min(left));
            listed_zombie = zombie;
        }
        ledger.zombie = listed_zombie;

        let Some(((total, used), own)) = total.zip(sample.memory.used).map(|(total, used)| {
            let own = sample.memory.reserved.unwrap_or(0).min(total);
            ((total, used.min(total.saturating_sub(own))), own)
        }) else {
            return ledger;
        };
        let free = total.saturating_sub(own).saturating_sub(used);
        let reserve = reserve.map_or(0, |r| policy_reserve(r, total)).max(own);
        // What policy sets aside beyond the driver's own part comes out of what is free.
        let set_aside = reserve.saturating_sub(own).min(free);
        ledger.driver_reserved = Some(own.saturating_add(set_aside));
        ledger.free = Some(free.saturating_sub(set_aside));

        if let (Some(charges), Some(pods), Some(foreign), Some(zombie)) =
            (sample.charges, ledger.pods, ledger.foreign, listed_zombie)
        {
            let explained = pods.saturating_add(foreign).saturating_add(zombie);
            let residual = signed(used).saturating_sub(signed(explained));
            ledger.ballast = sample.ballast.min(u64::try_from(residual).unwrap_or(0));
            let residual = residual.saturating_sub(signed(ledger.ballast));
            if !sample.torn {
                self.zombies.step(charges, residual, sample.managed, now);
            }
            let held = explained.saturating_add(ledger.ballast);
            let confirmed = self.zombies.confirmed.min(total.saturating_sub(held));
            ledger.zombie = Some(zombie.saturating_add(confirmed));
            ledger.unexplained = Some(residual.saturating_sub(signed(confirmed)));
            ledger.constant = self.zombies.normal.of(charges.len());
        } else {
            // Who holds the rest is not known: that the keeper holds its part still is.
            ledger.ballast = sample.ballast.min(used);
        }
        // Ballast is nobody's use: it is given back before anybody goes without.
        let used = used.saturating_sub(ledger.ballast);

        let declared = ledger
            .by_pod
            .iter()
            .fold(0u64, |sum, held| sum.saturating_add(declared(&held.pod).min(held.bytes.unwrap_or(0))))
            .min(used);
        let of = total.saturating_sub(reserve).saturating_sub(declared).max(1);
        // Whatever is neither free nor the driver's is used by somebody, named or not.
        ledger.level = Some(Share { used: used.saturating_sub(declared).min(of), of });
        ledger
    }
}

/// What policy sets aside of a device of so many bytes.
fn policy_reserve(reserve: &DriverReserve, total: u64) -> u64 {
    let percent = u128::from(total) * u128::try_from(reserve.percent).unwrap_or(0) / 100;
    let percent = u64::try_from(percent).unwrap_or(u64::MAX);
    percent.max(reserve.min_size.map_or(0, ByteSize::bytes)).min(total)
}

/// The bytes of the processes of some holders; missing if those of one are.
fn sum(charges: &[Charge], of: impl Fn(&Holder) -> bool) -> Option<u64> {
    charges.iter().filter(|c| of(&c.holder)).try_fold(0u64, |sum, c| Some(sum.saturating_add(c.bytes?)))
}

fn by_pod(charges: &[Charge], bound: u64) -> Vec<PodUse> {
    let add = |a: Option<u64>, b: Option<u64>| Some(a?.saturating_add(b?).min(bound));
    let mut pods: Vec<PodUse> = Vec::new();
    for charge in charges {
        let Holder::Container { pod, container } = &charge.holder else { continue };
        let bytes = charge.bytes.map(|b| b.min(bound));
        let place = pods.iter().position(|held| held.pod == *pod).unwrap_or(pods.len());
        if place == pods.len() {
            pods.push(PodUse { pod: pod.clone(), bytes: Some(0), containers: Vec::new() });
        }
        let Some(entry) = pods.get_mut(place) else { continue };
        entry.bytes = add(entry.bytes, bytes);
        match entry.containers.iter_mut().find(|(id, _)| id == container) {
            Some((_, sum)) => *sum = add(*sum, bytes),
            None => entry.containers.push((container.clone(), bytes)),
        }
    }
    pods
}

fn signed(bytes: u64) -> i64 {
    i64::try_from(bytes).unwrap_or(i64::MAX)
}

/// How long unexplained bytes must outlast the process that they seem to have belonged to.
const ZOMBIE_AFTER: u64 = 30_000;
/// How long it may take to tell such bytes from managed memory of the living.
const ZOMBIE_UNTIL: u64 = 60_000;
/// The largest residual that is taken for normal, for each process and once besides. More is
/// never calibrated away.
const NORMAL_MAX: u64 = 16 * ByteSize::MI;
/// Numbers of processes for which the residual is calibrated apart.
const CALIBRATED: usize = 65;

/// Finds memory that dead processes left behind and that the driver lists for nobody.
#[derive(Clone, Debug, Default)]
struct Zombies {
    /// Bytes that are certain.
    confirmed: u64,
    /// The least residual seen at rest, by the number of processes: contexts cost a little that
    /// the driver charges to nobody.
    normal: Normal,
    /// Listed at the last sample, by PID.
    listed: Vec<(u32, u64)>,
    /// Number of processes and residual at the last sample.
    last: Option<(usize, i64)>,
    /// The residual at the last sample, without `confirmed`.
    residual: Option<i64>,
    suspect: Option<Suspect>,
}

/// Unexplained bytes that appeared when a charged process died.
#[derive(Clone, Debug)]
struct Suspect {
    since: Millis,
    /// The residual before.
    before: i64,
    /// What the dead held: they cannot have left more.
    died: u64,
    /// The least that has been there since.
    bytes: u64,
}

impl Zombies {
    fn step(&mut self, charges: &[Charge], residual: i64, managed: bool, now: Millis) {
        let at_rest = self.last == Some((charges.len(), residual));
        self.last = Some((charges.len(), residual));
        if at_rest && self.suspect.is_none() {
            self.normal.calibrate(charges.len(), residual);
        }
        let constant = self.normal.of(charges.len());
        self.confirmed = self.confirmed.min(u64::try_from(residual).unwrap_or(0).saturating_sub(constant));
        let residual = residual.saturating_sub(signed(self.confirmed));
        let margin = signed(constant.saturating_add(noise(charges.len())));

        let died = self.listed.iter().filter(|(pid, _)| !charges.iter().any(|c| c.pid == *pid));
        let died = died.fold(0u64, |sum, (_, bytes)| sum.saturating_add(*bytes));
        if died > 0 {
            match &mut self.suspect {
                Some(suspect) => {
                    suspect.died = suspect.died.saturating_add(died);
                    suspect.bytes = suspect.bytes.saturating_add(died);
                    suspect.since = now;
                }
                // Bytes that were unexplained before belong to somebody who lives: managed
                // memory or the like. Then nothing can be told from the residual.
                None => {
                    self.suspect = self
                        .residual
                        .filter(|before| *before <= margin || charges.is_empty())
                        .map(|before| Suspect { since: now, before, died, bytes: died });
                }
            }
        }
        if let Some(suspect) = &mut self.suspect {
            let appeared =
                u64::try_from(residual.saturating_sub(suspect.before)).unwrap_or(0).min(suspect.died);
            suspect.bytes = suspect.bytes.min(appeared);
            let age = now.since(suspect.since);
            let only_theirs = charges.is_empty()
                || residual <= suspect.before.saturating_add(signed(suspect.bytes)).saturating_add(margin);
            if suspect.bytes <= noise(charges.len()) || age >= ZOMBIE_UNTIL || managed {
                self.suspect = None;
            } else if age >= ZOMBIE_AFTER && only_theirs {
                self.confirmed = self.confirmed.saturating_add(suspect.bytes);
                self.suspect = None;
            }
        }

        self.residual = Some(residual);
        self.listed.clear();
        self.listed.extend(charges.iter().filter_map(|c| Some((c.pid, c.bytes?))));
    }
}

/// What is normally in use and charged to nobody, by the number of processes.
#[derive(Clone, Debug)]
struct Normal([Option<u64>; CALIBRATED]);

impl Default for Normal {
    fn default() -> Self {
        Self([None; CALIBRATED])
    }
}

impl Normal {
    fn calibrate(&mut self, processes: usize, residual: i64) {
        let residual = u64::try_from(residual).unwrap_or(0);
        let most = NORMAL_MAX.saturating_mul(u64::try_from(processes).unwrap_or(u64::MAX).saturating_add(1));
        if let Some(least) = self.0.get_mut(processes.min(CALIBRATED - 1))
            && residual <= most
        {
            *least = Some(least.map_or(residual, |least| least.min(residual)));
        }
    }

    /// For as many processes, else for the most below that were seen at rest.
    fn of(&self, processes: usize) -> u64 {
        self.0.iter().take(processes.saturating_add(1)).rev().find_map(|least| *least).unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const GI: u64 = ByteSize::GI;
    const MI: u64 = ByteSize::MI;

    fn charge(pid: u32, bytes: u64, pod: &str) -> Charge {
        let holder = match pod {
            "foreign" => Holder::Foreign,
            "gone" => Holder::Gone,
            pod => Holder::Container { pod: pod.into(), container: Some(format!("{pod}-c").into()) },
        };
        Charge { pid, bytes: Some(bytes), holder }
    }

    fn memory(used: u64) -> Memory {
        Memory { total: Some(80 * GI), used: Some(used), reserved: Some(GI / 2) }
    }

    fn sample(used: u64, charges: &[Charge]) -> Sample<'_> {
        Sample { memory: memory(used), charges: Some(charges), torn: false, managed: false, ballast: 0 }
    }

    fn account(account: &mut Account, used: u64, charges: &[Charge], now: u64) -> Ledger {
        account.step(sample(used, charges), None, |_| 0, Millis(now))
    }

    fn adds_up(ledger: &Ledger) -> bool {
        let known = [ledger.driver_reserved, ledger.pods, ledger.foreign, ledger.zombie, ledger.free];
        let sum: i128 = known.iter().map(|b| i128::from(b.unwrap())).sum();
        let held = i128::from(ledger.ballast) + i128::from(ledger.leased);
        sum + held + i128::from(ledger.unexplained.unwrap()) == i128::from(ledger.total.unwrap())
    }

    #[test]
    fn processes_of_a_pod_are_summed_over_its_containers() {
        let mut charges = [charge(1, GI, "a"), charge(2, 2 * GI, "a"), charge(3, 4 * GI, "b")];
        charges[1].holder = Holder::Container { pod: "a".into(), container: Some("other".into()) };
        let ledger = account(&mut Account::default(), 8 * GI, &charges, 0);
        assert_eq!(ledger.used_by("a"), Some(3 * GI));
        assert_eq!(ledger.by_pod[0].containers.len(), 2);
        assert_eq!(ledger.unexplained, Some(signed(GI)));
        assert!(adds_up(&ledger));
    }

    #[test]
    fn a01_a_pod_never_holds_more_than_the_device() {
        let ledger =
            account(&mut Account::default(), 10 * GI, &[charge(1, u64::MAX, "a"), charge(2, GI, "b")], 0);
        assert_eq!(ledger.used_by("a"), Some(80 * GI));
        assert_eq!(ledger.pods, Some(80 * GI));
        assert_eq!(ledger.unexplained, Some(-signed(70 * GI)), "the sign is kept");
        assert!(adds_up(&ledger));
    }

    #[test]
    fn a16_the_drivers_reserve_counts_as_neither_used_nor_free() {
        let reserve = DriverReserve { percent: 3, min_size: Some(ByteSize(4 * GI)) };
        let ledger = Account::default().step(sample(0, &[]), Some(&reserve), |_| 0, Millis(0));
        assert_eq!(ledger.driver_reserved, Some(4 * GI));
        assert_eq!(ledger.free, Some(76 * GI));
        assert_eq!(ledger.level, Some(Share { used: 0, of: 76 * GI }));
    }

    #[test]
    fn a_reserve_that_is_used_up_still_adds_up() {
        let reserve = DriverReserve { percent: 50, min_size: None };
        let charges = [charge(1, 60 * GI, "a")];
        let ledger = Account::default().step(sample(60 * GI, &charges), Some(&reserve), |_| 0, Millis(0));
        assert!(adds_up(&ledger));
        assert_eq!(ledger.free, Some(0));
        assert!(ledger.level.unwrap().at_least(100));
    }

    #[test]
    fn a19_foreign_processes_have_their_own_bucket() {
        let ledger = account(&mut Account::default(), 12 * GI, &[charge(1, 10 * GI, "foreign")], 0);
        assert_eq!((ledger.foreign, ledger.pods), (Some(10 * GI), Some(0)));
    }

    #[test]
    fn l03_bytes_listed_for_a_dead_process_are_zombie_at_once_and_nobodys() {
        let ledger =
            account(&mut Account::default(), 9 * GI, &[charge(1, 8 * GI, "gone"), charge(2, GI, "a")], 0);
        assert_eq!(ledger.zombie, Some(8 * GI));
        assert_eq!(ledger.used_by("a"), Some(GI));
        assert!(adds_up(&ledger));
    }

    #[test]
    fn l04_bytes_that_outlast_their_process_become_zombie_after_30_s() {
        let mut state = Account::default();
        let neighbour = charge(2, GI, "b");
        account(&mut state, 9 * GI, &[charge(1, 8 * GI, "a"), neighbour.clone()], 0);
        let early = account(&mut state, 6 * GI, std::slice::from_ref(&neighbour), 100);
        assert_eq!((early.zombie, early.unexplained), (Some(0), Some(signed(5 * GI))));
        assert_eq!(account(&mut state, 6 * GI, std::slice::from_ref(&neighbour), 30_099).zombie, Some(0));
        let late = account(&mut state, 6 * GI, std::slice::from_ref(&neighbour), 30_100);
        assert_eq!((late.zombie, late.unexplained), (Some(5 * GI), Some(0)));
        assert!(adds_up(&late));
        let reset = account(&mut state, GI, &[neighbour], 40_000);
        assert_eq!(reset.zombie, Some(0), "it is zombie only while it is there");
    }

    #[test]
    fn memory_that_comes_back_late_is_no_zombie() {
        let mut state = Account::default();
        account(&mut state, 8 * GI, &[charge(1, 8 * GI, "a")], 0);
        account(&mut state, 8 * GI, &[], 100);
        account(&mut state, 0, &[], 300);
        let ledger = account(&mut state, 5 * GI, &[], 60_000);
        assert_eq!((ledger.zombie, ledger.unexplained), (Some(0), Some(signed(5 * GI))));
    }

    #[test]
    fn managed_memory_of_the_living_is_never_zombie() {
        // Before: 4 GiB of managed memory of the neighbour is unexplained. It grows as the other
        // process dies.
        let mut state = Account::default();
        let neighbour = charge(2, GI, "b");
        account(&mut state, 13 * GI, &[charge(1, 8 * GI, "a"), neighbour.clone()], 0);
        account(&mut state, 13 * GI, std::slice::from_ref(&neighbour), 100);
        assert_eq!(account(&mut state, 13 * GI, &[neighbour], 100_000).zombie, Some(0));
    }

    #[test]
    fn nothing_is_called_zombie_beside_a_process_known_to_use_managed_memory() {
        let mut state = Account::default();
        let neighbour = charge(2, GI, "b");
        let mut step = |charges: &[Charge], now| {
            let managed = Sample { managed: true, ..sample(9 * GI, charges) };
            state.step(managed, None, |_| 0, Millis(now)).zombie
        };
        step(&[charge(1, 8 * GI, "a"), neighbour.clone()], 0);
        step(std::slice::from_ref(&neighbour), 100);
        assert_eq!(step(&[neighbour], 100_000), Some(0));
    }

    #[test]
    fn unlisted_memory_that_grows_after_a_death_is_not_called_zombie() {
        let mut state = Account::default();
        let neighbour = charge(2, GI, "b");
        account(&mut state, 9 * GI, &[charge(1, 8 * GI, "a"), neighbour.clone()], 0);
        account(&mut state, 2 * GI, std::slice::from_ref(&neighbour), 100);
        for time in [10_000, 30_100, 60_100, 90_000] {
            assert_eq!(account(&mut state, 30 * GI, std::slice::from_ref(&neighbour), time).zombie, Some(0));
        }
    }

    #[test]
    fn what_the_driver_charges_to_nobody_at_rest_is_normal() {
        // 3 MiB for the device and 6 MiB for each process.
        let mut state = Account::default();
        let charges: Vec<_> = (1..=3).map(|pid| charge(pid, GI, "a")).collect();
        for n in [0usize, 1, 3, 2, 3, 0] {
            let overhead = if n == 0 { 0 } else { 3 * MI + 6 * MI * n as u64 };
            for time in 0..3 {
                let ledger = account(&mut state, n as u64 * GI + overhead, &charges[..n], time);
                assert!(time == 0 || ledger.unusual() == 0, "{n} {ledger:?}");
            }
        }
        let more = account(&mut state, 3 * GI + 21 * MI + GI, &charges, 100);
        assert_eq!((more.constant, more.unusual()), (21 * MI, GI - 6 * MI));
    }

    #[test]
    fn much_is_never_calibrated_away() {
        let mut state = Account::default();
        let mut ledger = Ledger::default();
        for time in 0..100 {
            ledger = account(&mut state, 3 * GI, &[charge(1, GI, "a")], time);
        }
        assert_eq!((ledger.constant, ledger.unusual()), (0, 2 * GI - 2 * MI));
    }

    #[test]
    fn missing_numbers_stay_missing() {
        let mut process = charge(1, 0, "a");
        process.bytes = None;
        let ledger = account(&mut Account::default(), 5 * GI, &[process, charge(2, GI, "foreign")], 0);
        assert_eq!((ledger.pods, ledger.unexplained, ledger.used_by("a")), (None, None, None));
        assert_eq!(ledger.foreign, Some(GI));
        assert_eq!(ledger.level.map(|l| l.used), Some(5 * GI), "the device's use is known all the same");

        let unlisted = Sample { charges: None, ..sample(GI, &[]) };
        let ledger = Account::default().step(unlisted, None, |_| 0, Millis(0));
        assert_eq!((ledger.pods, ledger.used_by("a")), (None, None));

        let charges = [charge(1, GI, "a")];
        let blind = Sample { memory: Memory::default(), ..sample(0, &charges) };
        let ledger = Account::default().step(blind, None, |_| 0, Millis(0));
        assert_eq!((ledger.total, ledger.free, ledger.level), (None, None, None));
        assert_eq!(ledger.used_by("a"), Some(GI));
    }

    fn holding(ballast: u64, used: u64, charges: &[Charge]) -> Ledger {
        let sample = Sample { ballast, ..sample(used, charges) };
        Account::default().step(sample, None, |_| 0, Millis(0))
    }

    #[test]
    fn ballast_is_nobodys_use_and_explained() {
        let charges = [charge(1, 10 * GI, "a")];
        let ledger = holding(40 * GI, 51 * GI, &charges);
        assert_eq!((ledger.ballast, ledger.unexplained), (40 * GI, Some(signed(GI))));
        assert_eq!(ledger.free, Some(80 * GI - GI / 2 - 51 * GI));
        assert_eq!(ledger.level, Some(Share { used: 11 * GI, of: 80 * GI - GI / 2 }));
        assert!(adds_up(&ledger));
    }

    #[test]
    fn a_keeper_is_believed_only_as_far_as_the_driver_bears_it_out() {
        let charges = [charge(1, 10 * GI, "a")];
        let ledger = holding(u64::MAX, 12 * GI, &charges);
        assert_eq!((ledger.ballast, ledger.unexplained), (2 * GI, Some(0)));
        assert_eq!(ledger.level.unwrap().used, 10 * GI);
        let over = holding(GI, 8 * GI, &charges);
        assert_eq!((over.ballast, over.unexplained), (0, Some(-signed(2 * GI))), "the sign is kept");
        assert!(adds_up(&ledger) && adds_up(&over));
    }

    #[test]
    fn ballast_is_held_even_where_the_driver_lists_nobody() {
        let sample = Sample { charges: None, ballast: 40 * GI, ..sample(50 * GI, &[]) };
        let ledger = Account::default().step(sample, None, |_| 0, Millis(0));
        assert_eq!((ledger.ballast, ledger.unexplained), (40 * GI, None));
        assert_eq!(ledger.level.unwrap().used, 10 * GI);
    }

    #[test]
    fn memory_made_without_a_context_stays_unexplained_beside_the_ballast() {
        let ledger = holding(40 * GI, 60 * GI, &[charge(1, 10 * GI, "a")]);
        assert_eq!((ledger.unexplained, ledger.unusual()), (Some(signed(10 * GI)), 10 * GI - 2 * MI));
    }

    #[test]
    fn ballast_that_is_taken_in_when_a_process_dies_is_no_zombie() {
        let mut state = Account::default();
        let mut step = |ballast, used, charges: &[Charge], now| {
            let sample = Sample { ballast, ..sample(used, charges) };
            state.step(sample, None, |_| 0, Millis(now))
        };
        step(20 * GI, 28 * GI, &[charge(1, 8 * GI, "a")], 0);
        // The keeper has taken what the dead left before it says so.
        step(20 * GI, 28 * GI, &[], 100);
        for time in [200, 30_200, 90_000] {
            let ledger = step(28 * GI, 28 * GI, &[], time);
            assert_eq!((ledger.zombie, ledger.unexplained, ledger.ballast), (Some(0), Some(0), 28 * GI));
        }
    }

    #[test]
    fn declared_memory_is_clipped_at_present_use() {
        let charges = [charge(1, 4 * GI, "a"), charge(2, 10 * GI, "b")];
        let declared = |pod: &str| if pod == "a" { 8 * GI } else { 0 };
        let ledger = Account::default().step(sample(14 * GI, &charges), None, declared, Millis(0));
        assert_eq!(ledger.level, Some(Share { used: 10 * GI, of: 80 * GI - GI / 2 - 4 * GI }));
    }

    fn charges() -> impl Strategy<Value = Vec<Charge>> {
        let bytes = prop_oneof![0..100 * GI, any::<u64>()];
        let holder = prop_oneof!["[ab]", Just("foreign".to_owned()), Just("gone".to_owned())];
        prop::collection::vec((0u32..12, bytes, holder).prop_map(|(p, b, h)| charge(p, b, &h)), 0..8)
    }

    fn ballast() -> impl Strategy<Value = u64> {
        prop_oneof![Just(0), 0..100 * GI, any::<u64>()]
    }

    proptest! {
        #[test]
        fn the_ledger_adds_up_saturates_and_never_exceeds_the_device(
            samples in prop::collection::vec((any::<u64>(), any::<u64>(), charges(), 0u64..40_000, any::<bool>(), ballast()), 1..30),
            total in 1u64..=1 << 50, percent in 0i32..=50, declared: u64,
        ) {
            let (mut state, mut now) = (Account::default(), Millis(0));
            for (used, reserved, charges, gap, torn, ballast) in samples {
                now = now.plus(gap);
                let memory = Memory { total: Some(total), used: Some(used), reserved: Some(reserved) };
                let sample = Sample { memory, charges: Some(&charges), torn, managed: false, ballast };
                let reserve = DriverReserve { percent, min_size: None };
                let ledger = state.step(sample, Some(&reserve), |_| declared, now);
                prop_assert!(adds_up(&ledger), "{ledger:?}");
                let parts = [ledger.driver_reserved, ledger.pods, ledger.foreign, ledger.zombie, ledger.free];
                prop_assert!(parts.iter().all(|part| part.unwrap() <= total));
                prop_assert!(ledger.by_pod.iter().all(|held| held.bytes.unwrap() <= total));
                let held = ledger.pods.unwrap() + ledger.foreign.unwrap() + ledger.zombie.unwrap();
                prop_assert!(held <= total);
                prop_assert!(ledger.ballast <= ballast && ledger.ballast <= total - held);
                // What is held back is never called use, and never hides any.
                let without = Account::default()
                    .step(Sample { ballast: 0, ..sample }, Some(&reserve), |_| 0, now);
                let with = Account::default().step(sample, Some(&reserve), |_| 0, now);
                let (without, with) = (without.level.unwrap(), with.level.unwrap());
                prop_assert_eq!(without.of, with.of);
                prop_assert!(with.used <= without.used && without.used <= with.used.saturating_add(ballast));
                let level = ledger.level.unwrap();
                prop_assert!(level.used <= level.of && level.of <= total);
            }
        }
    }
}
