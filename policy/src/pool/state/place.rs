//! The step that says who is entitled to what: what is owed first, then first come, first served.

use super::{DevicePool, Turn, sums::positive};
use crate::{
    pool::{Kind, Request, grant::by_age, ladder},
    time::Millis,
};

impl DevicePool {
    /// Entitles pods to what they are due or ask for, as far as there is something.
    pub(super) fn place(&mut self, now: Millis, turn: &mut Turn) {
        let still = self.start_hold_until().is_some_and(|until| now < until);
        self.place_entitled(now);
        if still {
            let uids: Vec<_> = self.pods.keys().cloned().collect();
            for uid in &uids {
                self.disentitle(uid);
            }
        }
        let mut missing = self.place_bound(now).saturating_add(self.place_owed(now));
        let waits = self.place_surplus(still, now);
        if turn.fresh {
            // What is owed and can be held back in no other way.
            let sums = self.sums();
            missing = missing.max(sums.owed.saturating_sub(sums.ballast.max(sums.target())));
        }
        if missing > 0 {
            self.reclaim(missing, now, turn);
        }
        if turn.fresh && !still && !waits && missing == 0 && self.in_flight.is_none() {
            self.place_ahead();
        }
    }

    /// Requests for what a pod is entitled to already only wait for the bytes.
    fn place_entitled(&mut self, now: Millis) {
        for waiting in self.queue.iter_mut().filter(|w| w.placed.is_none()) {
            let pod = self.pods.get(&waiting.request.uid);
            if pod.is_some_and(|pod| waiting.request.wanted <= pod.entitled) {
                waiting.placed = Some(now);
            }
        }
    }

    /// Pods without a guard get their limit as soon as they are bound. What is missing, in bytes.
    fn place_bound(&mut self, now: Millis) -> u64 {
        let calm = self.takers.calm(self.settings.calm_ms, now);
        let mut missing = 0u64;
        for uid in by_age(&self.pods) {
            let sums = self.sums();
            let Some(pod) = self.pods.get_mut(&uid).filter(|pod| pod.kind == Kind::Static) else { continue };
            let owed = pod.owed();
            // While somebody takes what is not his, more of it would only feed him.
            let there = if pod.taken > 0 && !calm { sums.loose() } else { sums.physical() };
            // What it holds already need not be free as well.
            let there = there.max(0) + i128::from(pod.ungranted());
            let more = if there >= i128::from(owed) { owed } else { ladder::floor(positive(there)) };
            if pod.taken == 0 || calm {
                missing = missing.saturating_add(owed.saturating_sub(more));
            }
            if pod.taken > 0 && i128::from(more) > sums.loose().max(0) + i128::from(pod.ungranted()) {
                self.takers.make_up();
            }
            pod.entitled = pod.entitled.saturating_add(more);
            pod.taken = pod.taken.saturating_sub(more);
            self.due = self.due.saturating_add(more);
        }
        missing
    }

    /// Requests within a guarantee, first come first served. What is missing, in bytes.
    fn place_owed(&mut self, now: Millis) -> u64 {
        let mut missing = 0u64;
        for request in self.unplaced() {
            if !self.is_owed(&request) {
                continue;
            }
            let Some(pod) = self.pods.get(&request.uid) else { continue };
            let to = ladder::ceil(request.wanted).min(pod.covered);
            let more = to.saturating_sub(pod.entitled);
            let there = positive(self.sums().physical()).saturating_add(pod.ungranted());
            if missing == 0 && more <= there {
                self.entitle(request.id, to, now);
            } else {
                missing = missing.saturating_add(more.saturating_sub(there));
            }
        }
        missing
    }

    /// Requests above a guarantee, first come first served, none passing another. Whether one is
    /// left waiting.
    fn place_surplus(&mut self, still: bool, now: Millis) -> bool {
        for request in self.unplaced() {
            let Some(pod) = self.pods.get(&request.uid) else { continue };
            if request.wanted > pod.limit || self.is_owed(&request) {
                continue;
            }
            let least = ladder::ceil(request.wanted).min(pod.limit);
            let spare = self.sums().spare(pod.ungranted());
            let surplus = least.saturating_sub(pod.entitled.max(pod.covered));
            if self.pressure.freeze || surplus > spare {
                return true;
            }
            let step = self.settings.grant_step.max(ladder::GRAIN);
            let ahead = least.checked_next_multiple_of(step).unwrap_or(least);
            let most = least.saturating_add(ladder::floor(spare.saturating_sub(surplus)));
            let alone = self.queue.len() == 1;
            let to = if still || !alone { least } else { ahead.min(most).min(pod.limit).max(least) };
            self.entitle(request.id, to, now);
        }
        false
    }

    /// Pods that are growing get their next step before they ask.
    fn place_ahead(&mut self) {
        let step = ladder::floor(self.settings.grant_step);
        for uid in by_age(&self.pods) {
            let sums = self.sums();
            let frozen = self.pressure.freeze;
            let Some(pod) = self.pods.get_mut(&uid) else { continue };
            let ahead = pod.entitled.saturating_sub(pod.committed());
            if pod.kind != Kind::Elastic || !pod.growing || ahead >= step / 2 || pod.taken > 0 {
                continue;
            }
            let spare = if frozen { 0 } else { sums.spare(0) };
            let owed = pod.owed().min(ladder::floor(positive(sums.physical())));
            let more = step.min(owed.saturating_add(ladder::floor(spare)));
            pod.entitled = pod.entitled.saturating_add(more).min(pod.limit.max(pod.entitled));
        }
    }

    /// Takes idle bytes above guarantees back, so that a guarantee can be kept. They can be given
    /// out when the next sample shows that the guards have not used them in the meantime.
    fn reclaim(&mut self, missing: u64, now: Millis, turn: &mut Turn) {
        let coming = self.pods.values().fold(0u64, |sum, pod| {
            sum.saturating_add(pod.believed().saturating_sub(pod.entitled.max(pod.granted)))
        });
        let mut missing = missing.saturating_sub(coming);
        // A sample that told nothing new is no better for being taken again at once.
        turn.sample_soon |= coming > 0 && (turn.fresh || !turn.sampled);
        let mut order: Vec<_> =
            self.pods.iter().map(|(uid, pod)| (pod.idle_surplus(), uid.clone())).collect();
        order.sort_by(|a, b| b.cmp(a));
        for (surplus, uid) in order {
            let by = surplus.min(ladder::ceil(missing));
            if by == 0 {
                continue;
            }
            missing = missing.saturating_sub(by);
            let Some(pod) = self.pods.get_mut(&uid) else { continue };
            pod.lower(pod.entitled.saturating_sub(by), now);
            turn.sample_soon = true;
        }
    }

    /// The requests for which nothing was found yet, in order.
    fn unplaced(&self) -> Vec<Request> {
        self.queue.iter().filter(|w| w.placed.is_none()).map(|w| w.request.clone()).collect()
    }

    /// Entitles the pod of a request to so many bytes in total.
    fn entitle(&mut self, id: u64, to: u64, now: Millis) {
        let Some(waiting) = self.queue.iter_mut().find(|w| w.request.id == id) else { return };
        waiting.placed = Some(now);
        let Some(pod) = self.pods.get_mut(&waiting.request.uid) else { return };
        let more = to.saturating_sub(pod.entitled);
        pod.entitled = pod.entitled.max(to);
        pod.taken = pod.taken.saturating_sub(more);
        self.due = self.due.saturating_add(more);
    }
}
