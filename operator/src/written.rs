//! The decisions that this replica wrote, until its watch has heard of them. Without this a
//! decision could be made again on the news from before the last.

use std::{
    collections::HashMap,
    sync::{Mutex, PoisonError},
};

use highwater_crds::GpuMemoryIncident;

use crate::context::Key;

#[derive(Debug, Default)]
pub(crate) struct Written(Mutex<HashMap<Key, GpuMemoryIncident>>);

impl Written {
    /// Remembers an incident as the API server answered to a write.
    pub(crate) fn put(&self, key: &Key, incident: &GpuMemoryIncident) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).insert(key.clone(), incident.clone());
    }

    /// The newer of what was heard and what was written.
    pub(crate) fn newest(&self, key: &Key, heard: &GpuMemoryIncident) -> GpuMemoryIncident {
        self.by_newest(key, heard, GpuMemoryIncident::clone)
    }

    /// What is read of the newer of what was heard and what was written.
    pub(crate) fn by_newest<T>(
        &self,
        key: &Key,
        heard: &GpuMemoryIncident,
        read: impl FnOnce(&GpuMemoryIncident) -> T,
    ) -> T {
        let mut written = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match written.get(key) {
            Some(own) if own.metadata.uid == heard.metadata.uid && version(own) > version(heard) => read(own),
            _ => {
                written.remove(key);
                read(heard)
            }
        }
    }

    /// Forgets an incident.
    pub(crate) fn forget(&self, key: &Key) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).remove(key);
    }
}

/// Versions of one object are numbers that grow.
fn version(incident: &GpuMemoryIncident) -> Option<u64> {
    incident.metadata.resource_version.as_ref()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn what_was_written_counts_until_it_is_heard() {
        let incident = |uid: &str, version: &str| -> GpuMemoryIncident {
            serde_json::from_value(json!({
                "metadata": {"name": "i", "namespace": "team", "uid": uid, "resourceVersion": version},
                "spec": {"kind": "QuotaBreach", "mode": "Enforce", "policy": "p", "node": "n", "device": "d", "episode": 1,
                         "evidence": {"at": "2026-01-01T00:00:00.000000Z"}, "proposed": {"action": "Restart"}}}))
            .unwrap()
        };
        let key = ("team".to_owned(), "i".to_owned());
        let written = Written::default();
        let version = |heard| written.newest(&key, &heard).metadata.resource_version.unwrap();
        written.put(&key, &incident("u", "100"));
        assert_eq!(version(incident("u", "99")), "100");
        assert_eq!(version(incident("u", "101")), "101");
        assert_eq!(version(incident("u", "99")), "99", "heard once, it is forgotten");
        written.put(&key, &incident("u", "100"));
        assert_eq!(version(incident("other", "5")), "5");
    }
}
