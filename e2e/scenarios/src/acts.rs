//! What acts were done, as incidents, their Events and the API server's audit log tell it.

use anyhow::{Context as _, Result, bail, ensure};
use highwater_crds::{
    ActReport, ActState, ActionType, Decision, DecisionState, GpuMemoryIncident, IncidentKind,
};
use highwater_e2e::eventually;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use kube::{Api, ResourceExt as _, api::ListParams};

use crate::{NODE, SYSTEM, Scenario, TIMEOUT};

/// What the agent says of an act that it carries out.
pub fn acted(incident: &GpuMemoryIncident) -> Option<&ActReport> {
    incident.status.as_ref()?.observation.as_ref()?.act.as_ref()
}

fn decision(incident: &GpuMemoryIncident) -> Option<&Decision> {
    incident.status.as_ref()?.decision.as_ref()
}

impl Scenario {
    /// The incidents of a policy, wherever they are, oldest first.
    pub async fn incidents_of(&self, policy: &str) -> Result<Vec<GpuMemoryIncident>> {
        let incidents: Api<GpuMemoryIncident> = Api::all(self.client.clone());
        let mut list = incidents.list(&ListParams::default()).await?.items;
        list.retain(|incident| incident.spec.policy == policy);
        list.sort_by_key(|incident| incident.spec.evidence.at.0);
        Ok(list)
    }

    /// Waits until the agent says that an act about a pod is done; the incident.
    pub async fn act_done(&self, pod: &Pod, action: ActionType) -> Result<GpuMemoryIncident> {
        self.act_is(pod, action, &[ActState::Done]).await
    }

    /// Waits until the agent says that an act about a pod is as far as one of these; the incident.
    ///
    /// Fails at once where it has ended without.
    pub async fn act_is(
        &self,
        pod: &Pod,
        action: ActionType,
        one_of: &[ActState],
    ) -> Result<GpuMemoryIncident> {
        let uid = pod.uid().context("no UID")?;
        let what = format!("{action:?} of {} to be one of {one_of:?}", pod.name_any());
        let found = eventually(&what, TIMEOUT, async || {
            let mut incidents = self.incidents().await?;
            incidents.retain(|incident| {
                incident.spec.proposed.action == action
                    && incident.spec.subject.as_ref().is_some_and(|subject| subject.uid == uid)
            });
            let incident = incidents.pop().context("there is no such incident")?;
            if acted(&incident).is_some_and(|act| one_of.contains(&act.state)) {
                return Ok(Ok(incident));
            }
            let (act, decided) = (acted(&incident).cloned(), decision(&incident).cloned());
            match decided {
                Some(d) if d.state.is_final() && d.state != DecisionState::Succeeded => {
                    Ok(Err(anyhow::anyhow!("{what}: it ended {:?}/{}: {}", d.state, d.reason, d.message)))
                }
                decided => bail!("the act is {act:?}, the decision {decided:?}"),
            }
        });
        found.await?
    }

    /// Waits until an incident of this kind and action has reached a state for a reason; the incident.
    ///
    /// Fails at once where it ended in another way. For those that are about nobody; of several the
    /// newest counts.
    pub async fn incident_for(
        &self,
        policy: &str,
        kind: IncidentKind,
        action: ActionType,
        state: DecisionState,
        reason: &str,
    ) -> Result<GpuMemoryIncident> {
        let what = format!("an incident {kind:?} of {policy} with {action:?} that is {state:?}/{reason}");
        let found = eventually(&what, 2 * TIMEOUT, async || {
            let mut incidents = self.incidents_of(policy).await?;
            incidents.retain(|i| i.spec.kind == kind && i.spec.proposed.action == action);
            let incident = incidents.pop().context("there is no such incident")?;
            match decision(&incident).cloned() {
                Some(d) if d.state == state && d.reason == reason => Ok(Ok(incident)),
                Some(d) if d.state.is_final() => {
                    Ok(Err(anyhow::anyhow!("{what}: it ended {:?}/{}: {}", d.state, d.reason, d.message)))
                }
                Some(d) => bail!("it is {:?}/{}: {}", d.state, d.reason, d.message),
                None => bail!("it has no decision"),
            }
        });
        found.await?
    }

    /// Fails where a policy has led to an incident that asks for one of these acts.
    pub async fn no_incident_with(&self, policy: &str, actions: &[ActionType]) -> Result<()> {
        let incidents = self.incidents_of(policy).await?;
        let unwanted = incidents.iter().find(|incident| actions.contains(&incident.spec.proposed.action));
        if let Some(incident) = unwanted {
            bail!(
                "{} asks for {:?}: {}",
                incident.name_any(),
                incident.spec.proposed.action,
                incident.spec.evidence.explanation
            );
        }
        Ok(())
    }

    /// Waits until the enforced level of a device of the node is this: 0 Normal to 3 Emergency.
    pub async fn level(&self, device: &str, level: i64) -> Result<()> {
        self.level_on(NODE, device, level).await
    }

    /// The same on another node.
    pub async fn level_on(&self, node: &str, device: &str, level: i64) -> Result<()> {
        let labels = [("device", device), ("mode", "Enforce")];
        self.metric_on(node, "highwater_device_level", &labels, |now| now == Some(level)).await.map(drop)
    }

    /// How often this pod was evicted since then, by the API server's account.
    pub fn evictions_of(&self, pod: &Pod, since: Timestamp) -> Result<usize> {
        let name = pod.name_any();
        let evictions = self.evictions_since(since)?;
        Ok(evictions.iter().filter(|write| write.namespace == self.namespace && write.name == name).count())
    }

    /// Fails unless a decision says what each budget said, with numbers.
    pub fn explained(&self, incident: &GpuMemoryIncident) -> Result<()> {
        let decided = decision(incident).context("no decision")?;
        let has_number = |text: &str| text.chars().any(|character| character.is_ascii_digit());
        ensure!(has_number(&incident.spec.evidence.explanation), "evidence: {:?}", incident.spec.evidence);
        ensure!(!decided.budgets.is_empty(), "no budget said anything: {decided:?}");
        ensure!(
            decided.budgets.iter().all(|budget| has_number(budget)),
            "a budget without numbers: {:?}",
            decided.budgets
        );
        Ok(())
    }

    /// The incidents that are about no pod, in the namespace of Highwater.
    pub async fn incidents_about_nobody(&self, policy: &str) -> Result<Vec<GpuMemoryIncident>> {
        let incidents: Api<GpuMemoryIncident> = Api::namespaced(self.client.clone(), SYSTEM);
        let mut list = incidents.list(&ListParams::default()).await?.items;
        list.retain(|incident| incident.spec.policy == policy && incident.spec.subject.is_none());
        Ok(list)
    }

    /// Waits until a pod's containers are ready, or not.
    pub async fn ready(&self, pod: &Pod, ready: bool) -> Result<()> {
        let name = pod.name_any();
        eventually(
            &format!("{name} to be {}", if ready { "ready" } else { "unready" }),
            TIMEOUT,
            async || {
                let now = self.api::<Pod>().get(&name).await?;
                let conditions = now.status.and_then(|status| status.conditions).unwrap_or_default();
                let condition = conditions.iter().find(|condition| condition.type_ == "Ready");
                let status = condition.context("no condition Ready")?.status == "True";
                ensure!(status == ready, "it is not");
                Ok(())
            },
        )
        .await
    }
}
