//! Which pods and devices have an act under way, known before the API server's news of it.

use std::{
    collections::HashMap,
    sync::{Mutex, MutexGuard, PoisonError},
};

use crate::context::Key;

/// What an act concerns.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Claim {
    pub(crate) device: String,
    pub(crate) subject: String,
    /// Whether the act takes nothing from the pod and may be under way for long.
    pub(crate) gentle: bool,
}

impl Claim {
    /// Whether this act may not begin while the other is under way: one act a pod, and one a device.
    /// A gentle act on another pod does not count, nor on the same pod against one that is not.
    pub(crate) fn waits_for(&self, other: &Self) -> bool {
        (self.subject == other.subject && (self.gentle || !other.gentle))
            || (self.device == other.device && !other.gentle)
    }
}

#[derive(Debug, Default)]
pub(crate) struct Claims(Mutex<HashMap<Key, Claim>>);

impl Claims {
    /// Claims a pod and a device for the act of an incident. False where another holds either.
    pub(crate) fn take(&self, key: &Key, claim: &Claim) -> bool {
        let mut claims = self.lock();
        if claims.iter().any(|(other, held)| other != key && claim.waits_for(held)) {
            return false;
        }
        claims.insert(key.clone(), claim.clone());
        true
    }

    /// The incidents with an act under way, but for this one.
    pub(crate) fn others(&self, key: &Key) -> Vec<(String, Claim)> {
        self.lock()
            .iter()
            .filter(|(other, _)| *other != key)
            .map(|(other, claim)| (other.1.clone(), claim.clone()))
            .collect()
    }

    /// Whether the act of this incident is under way.
    pub(crate) fn holds(&self, key: &Key) -> bool {
        self.lock().contains_key(key)
    }

    /// The act of this incident is over.
    pub(crate) fn release(&self, key: &Key) {
        self.lock().remove(key);
    }

    /// Another leader acts now; what was known here is void.
    pub(crate) fn clear(&self) {
        self.lock().clear();
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Key, Claim>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_act_a_device_and_a_pod() {
        let claims = Claims::default();
        let claim = |device: &str, subject: &str| Claim {
            device: device.into(),
            subject: subject.into(),
            gentle: false,
        };
        let key = |name: &str| ("team".to_owned(), name.to_owned());
        assert!(claims.take(&key("a"), &claim("d1", "p1")));
        assert!(claims.take(&key("a"), &claim("d1", "p1")), "its own claim is no obstacle");
        assert!(!claims.take(&key("b"), &claim("d1", "p2")));
        assert!(!claims.take(&key("c"), &claim("d2", "p1")));
        assert!(claims.take(&key("d"), &claim("d2", "p2")));
        assert!(claims.holds(&key("a")) && !claims.holds(&key("b")));
        claims.release(&key("a"));
        assert!(claims.take(&key("b"), &claim("d1", "p3")));
        assert_eq!(claims.others(&key("b")), [("d".to_owned(), claim("d2", "p2"))]);
    }

    #[test]
    fn a_gentle_act_holds_up_only_its_like_on_the_same_pod() {
        let claims = Claims::default();
        let on = |pod: &str, gentle| Claim { device: "d".into(), subject: pod.into(), gentle };
        let claim = |gentle| on("p", gentle);
        let key = |name: &str| ("team".to_owned(), name.to_owned());
        assert!(claims.take(&key("unready"), &claim(true)));
        assert!(!claims.take(&key("again"), &claim(true)));
        assert!(claims.take(&key("neighbour"), &on("q", true)));
        assert!(claims.take(&key("restart"), &claim(false)));
        claims.release(&key("unready"));
        assert!(!claims.take(&key("unready"), &claim(true)));
    }
}
