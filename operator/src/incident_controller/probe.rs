//! Asks again whether a disruption budget still refuses an eviction, without acting, so that a long
//! wait costs no tokens, no observations and no writes.

use std::{
    collections::HashMap,
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use highwater_policy::remediation::{DISRUPTION_BUDGET, Eviction};
use tokio::time::Instant;

use super::{
    act::AFTER_REFUSAL,
    dereference::Scene,
    evict::{Run, evict},
};
use crate::context::{Context, Key};

/// After what time nobody asks for a refusal any more.
const FORGOTTEN: Duration = Duration::from_mins(10);

/// When a disruption budget last refused, and what it said.
#[derive(Debug, Default)]
pub(crate) struct Refusals(Mutex<HashMap<Key, (Instant, String)>>);

impl Refusals {
    pub(crate) fn put(&self, key: &Key, why: &str, now: Instant) {
        let mut refusals = self.lock();
        refusals.retain(|_, (at, _)| now.duration_since(*at) < FORGOTTEN);
        refusals.insert(key.clone(), (now, why.to_owned()));
    }

    /// What it said, if that is too recent to ask again.
    pub(super) fn recent(&self, key: &Key, now: Instant) -> Option<String> {
        let refusals = self.lock();
        let (at, why) = refusals.get(key)?;
        (now.duration_since(*at) < AFTER_REFUSAL).then(|| why.clone())
    }

    pub(crate) fn forget(&self, key: &Key) {
        self.lock().remove(key);
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Key, (Instant, String)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Why the disruption budget that refused the eviction before still refuses it, if it does. Not
/// asked while something else says wait anyway.
pub(super) async fn blocked(ctx: &Context, scene: &Scene) -> Option<String> {
    scene.decision().filter(|d| d.reason == DISRUPTION_BUDGET && !scene.waits_anyway())?;
    if let Some(why) = ctx.refusals.recent(&scene.key, Instant::now()) {
        return Some(why);
    }
    match evict(ctx, scene, Run::Dry).await {
        Eviction::Budget(why) => {
            ctx.refusals.put(&scene.key, &why, Instant::now());
            Some(why)
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_budget_is_asked_at_most_once_in_five_seconds() {
        let (refusals, start) = (Refusals::default(), Instant::now());
        let key = ("team".to_owned(), "i".to_owned());
        refusals.put(&key, "pdb x", start);
        assert_eq!(refusals.recent(&key, start + Duration::from_millis(4999)).as_deref(), Some("pdb x"));
        assert_eq!(refusals.recent(&key, start + Duration::from_secs(5)), None);
        refusals.forget(&key);
        assert_eq!(refusals.recent(&key, start), None);
    }
}
