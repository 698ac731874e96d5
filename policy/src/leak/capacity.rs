//! What a pod can come to on a device before an allocation fails.

use crate::ledger::Ledger;

/// What a pod can come to, in bytes: its limit if it has one, else the device without what is set aside
/// and what others hold or are promised. `promised` gives what a pod is guaranteed. `None` where that
/// is not known.
pub fn capacity(
    ledger: &Ledger,
    pod: &str,
    limit: Option<u64>,
    promised: impl IntoIterator<Item = (u64, u64)>,
) -> Option<u64> {
    let total = ledger.total?;
    if let Some(limit) = limit {
        return Some(limit.min(total));
    }
    let used = ledger.used_by(pod)?;
    // What pods hold together, and by how much some are promised more than they hold.
    let others = ledger.pods?.saturating_sub(used);
    let owed = promised
        .into_iter()
        .fold(0u64, |sum, (held, guarantee)| sum.saturating_add(guarantee.saturating_sub(held)));
    let unexplained = u64::try_from(ledger.unexplained.unwrap_or(0)).unwrap_or(0);
    let parts = [
        ledger.driver_reserved.unwrap_or(0),
        ledger.foreign.unwrap_or(0),
        ledger.zombie.unwrap_or(0),
        ledger.leased,
        unexplained,
        others,
        owed,
    ];
    let room = parts.into_iter().fold(total, u64::saturating_sub);
    Some(room.max(used))
}

/// The capacity that a detector is told next, having been told `last`: it takes a sudden large change for
/// another device, and of the same device it comes in steps.
pub fn in_steps(last: Option<u64>, next: u64) -> u64 {
    let Some(last) = last.filter(|last| *last > 1) else { return next };
    next.clamp(last / 2 + 1, last.saturating_mul(2).saturating_sub(1))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ledger::PodUse;

    const GI: u64 = 1 << 30;

    fn ledger(held: &[(&str, u64)]) -> Ledger {
        let of = |(pod, gib): &(&str, u64)| PodUse {
            pod: (*pod).into(),
            bytes: Some(gib * GI),
            containers: Vec::new(),
        };
        Ledger {
            total: Some(80 * GI),
            driver_reserved: Some(GI),
            pods: Some(held.iter().map(|(_, gib)| gib * GI).sum()),
            foreign: Some(2 * GI),
            zombie: Some(0),
            unexplained: Some(-5),
            processes: Some(held.len()),
            by_pod: held.iter().map(of).collect(),
            ..Ledger::default()
        }
    }

    #[test]
    fn a_limit_is_the_end_where_there_is_one() {
        let ledger = ledger(&[("a", 10), ("b", 20)]);
        assert_eq!(capacity(&ledger, "a", Some(16 * GI), []), Some(16 * GI));
        assert_eq!(capacity(&ledger, "a", Some(160 * GI), []), Some(80 * GI));
        assert_eq!(capacity(&Ledger::default(), "a", Some(16 * GI), []), None);
    }

    #[test]
    fn without_one_it_is_what_others_leave_and_are_not_promised() {
        let ledger = ledger(&[("a", 10), ("b", 20)]);
        assert_eq!(capacity(&ledger, "a", None, []), Some(57 * GI));
        assert_eq!(capacity(&ledger, "a", None, [(20 * GI, 30 * GI)]), Some(47 * GI));
        assert_eq!(capacity(&ledger, "a", None, [(20 * GI, 8 * GI)]), Some(57 * GI));
        assert_eq!(capacity(&ledger, "a", None, [(0, 79 * GI)]), Some(10 * GI), "it has that much");
        let unknown = Ledger { pods: None, ..ledger };
        assert_eq!(capacity(&unknown, "a", None, []), None);
    }

    #[test]
    fn a_large_change_comes_in_steps_that_are_none() {
        assert_eq!(in_steps(None, 80), 80);
        assert_eq!(in_steps(Some(20), 80), 39);
        assert_eq!(in_steps(Some(80), 20), 41);
        assert_eq!(in_steps(Some(80), 79), 79);
        let mut told = 20 * GI;
        let steps = (0..).take_while(|_| {
            told = in_steps(Some(told), 80 * GI);
            told != 80 * GI
        });
        assert_eq!(steps.count(), 2);
    }
}
