//! Which pods' engines were asked to sleep, and are to be woken up.
//!
//! That an engine sleeps is written down before it is asked to: whatever happens to the agent, it is woken up
//! once nothing presses any more.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    fs,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use highwater_crds::HookAction;
use highwater_policy::{
    pod::{Hook, PodFacts},
    time::Millis,
};
use serde::{Deserialize, Serialize};
use tracing::{info, warn};

use super::hook::{Answered, Call};
use crate::{
    ladder::Foot,
    publish::{Attempt, Notice},
    world::{Pod, Pods},
};

/// The hooks of the node.
#[derive(Debug)]
pub(crate) struct Hooks {
    path: PathBuf,
    /// Pods, as the kubelet knows them, whose engines were asked to sleep.
    asleep: BTreeMap<Arc<str>, Asleep>,
    /// The ladders whose calls are under way.
    asking: HashMap<Arc<str>, Foot>,
    /// Who is being woken up.
    waking: HashMap<Arc<str>, Attempt>,
    told: BTreeSet<Arc<str>>,
    /// Calls by preset and by what came of them.
    pub(crate) calls: BTreeMap<(&'static str, &'static str), u64>,
}

/// An engine that was asked to sleep.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Asleep {
    /// UUID of the device.
    device: String,
    /// Bytes that its pod held there before.
    held: u64,
}

impl Hooks {
    /// Goes on with what an earlier agent had put to sleep.
    pub(crate) fn open(state_dir: &Path) -> Self {
        let path = state_dir.join("asleep.json");
        let stored: Option<BTreeMap<String, Asleep>> =
            fs::read(&path).ok().and_then(|text| serde_json::from_slice(&text).ok());
        let asleep =
            stored.unwrap_or_default().into_iter().map(|(pod, asleep)| (pod.into(), asleep)).collect();
        Self {
            path,
            asleep,
            asking: HashMap::new(),
            waking: HashMap::new(),
            told: BTreeSet::new(),
            calls: BTreeMap::new(),
        }
    }

    /// The call by which a pod's engine is asked to free memory of a device, of which it holds so many bytes.
    /// An error says why it is not asked.
    pub(crate) fn ask(
        &mut self,
        foot: &Foot,
        pods: &Pods,
        pod: &Arc<Pod>,
        (device, held): (&Arc<str>, u64),
        limit: Duration,
    ) -> Result<Call, String> {
        let hook = pod.facts.hook.as_ref().ok_or_else(|| "the pod did not opt in".to_owned())?;
        let uid = &pod.kubelet_uid;
        if self.asking.contains_key(uid) || self.waking.contains_key(uid) {
            return Err("it is being asked already".to_owned());
        }
        let call = call(pods, pod, hook, (device, hook.preset.path()), limit, false)?;
        if hook.preset.way_back().is_some() {
            let device = device.to_string();
            // Of one that sleeps already what it held before counts.
            let before = self.asleep.get(uid).filter(|asleep| asleep.device == device).map_or(0, |a| a.held);
            self.asleep.insert(Arc::clone(uid), Asleep { device, held: held.max(before) });
            if let Err(error) = self.write() {
                self.asleep.remove(uid);
                return Err(format!("that it sleeps cannot be written down: {error}"));
            }
        }
        self.asking.insert(Arc::clone(uid), foot.clone());
        Ok(call)
    }

    /// Whether an engine is being asked to free memory, whoever wanted that.
    pub(crate) fn is_asking(&self, pod: &str) -> bool {
        self.asking.contains_key(pod)
    }

    /// The calls by which engines are woken up: those for whose pod, device and bytes held before `is_calm`.
    pub(crate) fn wake(
        &mut self,
        pods: &Pods,
        is_calm: impl Fn(&str, &str, u64) -> bool,
        now: Millis,
    ) -> Vec<Call> {
        let mut calls = Vec::new();
        for (uid, Asleep { device, held }) in &self.asleep {
            let Some(pod) = pods.get(uid) else { continue };
            let Some(hook) = &pod.facts.hook else { continue };
            let Some(path) = hook.preset.way_back() else { continue };
            if self.asking.contains_key(uid) || !is_calm(uid, device, *held) {
                continue;
            }
            let attempt = self.waking.entry(Arc::clone(uid)).or_default();
            if !attempt.ready(now) {
                continue;
            }
            let limit = Duration::from_millis(
                u64::try_from(HookAction::DEFAULT_TIMEOUT_MILLISECONDS).unwrap_or(0).saturating_mul(15),
            );
            let asked = (&device.as_str().into(), path.to_owned());
            if let Ok(call) = call(pods, pod, hook, asked, limit, true) {
                attempt.start();
                calls.push(call);
            }
        }
        calls
    }

    /// What came of a call. Returns the ladder that asked, and what there is to tell.
    pub(crate) fn answered(
        &mut self,
        answered: Answered,
        pods: &Pods,
        now: Millis,
    ) -> (Option<(Foot, bool)>, Option<Notice>) {
        let Answered { call, result } = answered;
        let uid = &call.pod;
        let outcome = result.as_ref().map_or_else(super::hook::Failure::as_str, |()| "done");
        let pod = pods.get(uid);
        let preset = pod.and_then(|pod| Some(pod.facts.hook.as_ref()?.preset.name())).unwrap_or("gone");
        *self.calls.entry((preset, outcome)).or_default() += 1;
        let foot = if call.undo { None } else { self.asking.remove(uid).map(|foot| (foot, result.is_ok())) };
        if call.undo {
            if let Some(attempt) = self.waking.get_mut(uid) {
                attempt.done(result.is_ok(), now);
            }
            if result.is_ok() {
                self.waking.remove(uid);
                self.forget(uid);
            }
        } else if matches!(&result, Err(super::hook::Failure::Status(_) | super::hook::Failure::Redirect(_)))
        {
            // It said that it does not sleep.
            self.forget(uid);
        }
        let Some(pod) = pod else { return (foot, None) };
        let notice = match &result {
            Ok(()) => {
                self.told.remove(uid);
                let what = if call.undo { "woken up" } else { "asked to free memory" };
                info!(pod = pod.facts.name, namespace = pod.facts.namespace, preset, "{what}");
                let note = format!("its engine was {what} by {preset} ({})", call.path);
                Some(Notice::normal(pod, "HookDone", "Hook", note))
            }
            Err(failure) => {
                warn!(pod = pod.facts.name, namespace = pod.facts.namespace, preset, %failure, "a hook failed");
                let note = format!("POST {} on port {} for {preset}: {failure}", call.path, call.port);
                // Waking up is tried again and again.
                let news = !call.undo || self.told.insert(Arc::clone(uid));
                news.then(|| Notice::warning(pod, "HookFailed", "Hook", note))
            }
        };
        (foot, notice)
    }

    /// Forgets pods that are gone.
    pub(crate) fn retain(&mut self, is_there: impl Fn(&str) -> bool) {
        self.asking.retain(|uid, _| is_there(uid));
        self.waking.retain(|uid, _| is_there(uid));
        self.told.retain(|uid| is_there(uid));
        let gone: Vec<_> = self.asleep.keys().filter(|uid| !is_there(uid)).cloned().collect();
        for uid in gone {
            self.forget(&uid);
        }
    }

    fn forget(&mut self, uid: &Arc<str>) {
        if self.asleep.remove(uid).is_some()
            && let Err(error) = self.write()
        {
            // It is then woken up once more, which does no harm.
            warn!(%error, "which engines sleep cannot be written down");
        }
    }

    fn write(&self) -> std::io::Result<()> {
        let stored: BTreeMap<&str, &Asleep> =
            self.asleep.iter().map(|(pod, asleep)| (&**pod, asleep)).collect();
        let unfinished = self.path.with_extension("unfinished");
        fs::write(&unfinished, serde_json::to_vec(&stored)?)?;
        fs::rename(&unfinished, &self.path)
    }
}

/// A call to the pod that is known by its UID, at the address that it has now.
fn call(
    pods: &Pods,
    pod: &Arc<Pod>,
    hook: &Hook,
    (device, path): (&Arc<str>, String),
    limit: Duration,
    undo: bool,
) -> Result<Call, String> {
    if pod.facts.terminating || pod.facts.finished {
        // Its address may be another's by now.
        return Err("the pod is ending".to_owned());
    }
    let address = pod.facts.pod_ip.ok_or_else(|| "the pod has no address of its own".to_owned())?;
    // Its sandbox died, and its address was given to the next pod before its status says so.
    if let Some(other) = pods.values().find(|other| {
        other.kubelet_uid != pod.kubelet_uid && !other.facts.finished && other.facts.pod_ip == Some(address)
    }) {
        let PodFacts { namespace, name, .. } = &other.facts;
        return Err(format!("its address {address} is also that of pod {namespace}/{name}"));
    }
    Ok(Call {
        pod: Arc::clone(&pod.kubelet_uid),
        device: Arc::clone(device),
        address,
        port: hook.port,
        path,
        limit,
        undo,
    })
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use highwater_crds::{BreakerScope, Mode};
    use highwater_policy::pod::HookPreset;

    use super::*;
    use crate::{act::hook::Failure, ladder::At};

    fn pod() -> Arc<Pod> {
        let facts = PodFacts {
            name: "a".into(),
            hook: Some(Hook { preset: HookPreset::VllmSleep, port: 8000 }),
            pod_ip: Some(Ipv4Addr::LOCALHOST.into()),
            ..PodFacts::default()
        };
        Arc::new(Pod {
            facts,
            uid: "a".into(),
            kubelet_uid: "a".into(),
            first_seen: Millis(0),
            host_oom_kills: 0,
        })
    }

    fn foot() -> Foot {
        Foot { device: "GPU-0".into(), mode: Mode::Enforce, at: At::Breaker(BreakerScope::Device), pod: None }
    }

    #[test]
    fn an_engine_that_sleeps_is_woken_up_by_a_later_agent_once_it_is_calm() {
        let state = tempfile::tempdir().unwrap();
        let pods: Pods = [("a".into(), pod())].into();
        let mut hooks = Hooks::open(state.path());
        let call = hooks.ask(&foot(), &pods, &pod(), (&"GPU-0".into(), 9), Duration::from_secs(1)).unwrap();
        assert_eq!((call.path.as_str(), call.port), ("/sleep?level=1", 8000));
        assert!(
            hooks.ask(&foot(), &pods, &pod(), (&"GPU-0".into(), 9), Duration::from_secs(1)).is_err(),
            "once"
        );
        // It ends before it hears what came of it.
        let mut hooks = Hooks::open(state.path());
        assert!(hooks.wake(&pods, |_, _, _| false, Millis(0)).is_empty());
        let mut calls = hooks.wake(&pods, |_, _, _| true, Millis(0));
        assert_eq!(calls.len(), 1);
        assert!(hooks.wake(&pods, |_, _, _| true, Millis(0)).is_empty(), "one at a time");
        let call = calls.remove(0);
        assert_eq!(call.path, "/wake_up");
        let failed = Answered { call: call.clone(), result: Err(Failure::Status(500)) };
        assert!(hooks.answered(failed, &pods, Millis(0)).1.is_some());
        let mut calls = hooks.wake(&pods, |_, _, _| true, Millis(10_000));
        let done = Answered { call: calls.remove(0), result: Ok(()) };
        hooks.answered(done, &pods, Millis(10_001));
        assert!(hooks.wake(&pods, |_, _, _| true, Millis(99_000)).is_empty());
        assert!(Hooks::open(state.path()).asleep.is_empty());
    }

    #[test]
    fn a_pod_that_ends_or_has_no_address_is_not_asked() {
        let state = tempfile::tempdir().unwrap();
        let mut hooks = Hooks::open(state.path());
        for change in [
            (|facts: &mut PodFacts| facts.terminating = true) as fn(&mut PodFacts),
            |facts| facts.pod_ip = None,
            |facts| facts.hook = None,
        ] {
            let mut facts = pod().facts.clone();
            change(&mut facts);
            let pod = Arc::new(Pod {
                facts,
                uid: "a".into(),
                kubelet_uid: "a".into(),
                first_seen: Millis(0),
                host_oom_kills: 0,
            });
            assert!(
                hooks
                    .ask(&foot(), &Pods::default(), &pod, (&"GPU-0".into(), 9), Duration::from_secs(1))
                    .is_err()
            );
        }
        assert!(hooks.asleep.is_empty());
    }
    #[test]
    fn an_address_that_another_pod_has_by_now_is_not_called() {
        let state = tempfile::tempdir().unwrap();
        let mut hooks = Hooks::open(state.path());
        let named = |uid: &str, finished: bool| {
            let facts = PodFacts { name: uid.into(), finished, ..pod().facts.clone() };
            let (uid, kubelet_uid): (Arc<str>, Arc<str>) = (uid.into(), uid.into());
            (
                Arc::clone(&uid),
                Arc::new(Pod { facts, uid, kubelet_uid, first_seen: Millis(0), host_oom_kills: 0 }),
            )
        };
        let held = (&"GPU-0".into(), 9);
        let reused: Pods = [named("a", false), named("b", false)].into();
        let answer = hooks.ask(&foot(), &reused, &reused["a"], held, Duration::from_secs(1)).unwrap_err();
        assert!(answer.contains("pod /b"), "{answer}");
        assert!(hooks.asleep.is_empty(), "nobody was put to sleep");
        let finished: Pods = [named("a", false), named("b", true)].into();
        assert!(hooks.ask(&foot(), &finished, &finished["a"], held, Duration::from_secs(1)).is_ok());
        // It sleeps, and is not looked for at somebody else's address.
        let mut later = Hooks::open(state.path());
        assert!(later.wake(&reused, |_, _, _| true, Millis(0)).is_empty());
        assert_eq!(later.wake(&finished, |_, _, _| true, Millis(0)).len(), 1);
    }
}
