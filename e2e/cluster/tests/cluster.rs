//! The test cluster itself. These need one that is up (`make up`): run them with `--ignored`, one
//! at a time.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use highwater_e2e::{Cluster, eventually};
use k8s_openapi::api::core::v1::{Namespace, Node, Pod};
use kube::{
    Api,
    api::{DeleteParams, Patch, PatchParams},
};
use serde_json::{Value, json};

const SOON: Duration = Duration::from_mins(1);

/// Runs a test in a namespace of its own that is removed afterwards.
fn test(namespace: &str, body: impl AsyncFnOnce(&Cluster, &Api<Pod>) -> Result<()>) -> Result<()> {
    let cluster = Cluster::attach()?;
    cluster.block_on(async {
        let client = cluster.client().await?;
        let namespaces: Api<Namespace> = Api::all(client.clone());
        remove(&namespaces, namespace).await?;
        let object = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}});
        namespaces.patch(namespace, &manager(), &Patch::Apply(object)).await?;
        let result = body(&cluster, &Api::namespaced(client, namespace)).await;
        remove(&namespaces, namespace).await?;
        result
    })?
}

async fn remove(namespaces: &Api<Namespace>, name: &str) -> Result<()> {
    if namespaces.get_opt(name).await?.is_some() {
        namespaces.delete(name, &DeleteParams::default()).await?;
    }
    eventually("the namespace's end", SOON, async || {
        namespaces.get_opt(name).await?.is_none().then_some(()).context("it is still there")
    })
    .await
}

fn manager() -> PatchParams {
    PatchParams::apply("cluster-test").force()
}

async fn run(pods: &Api<Pod>, name: &str, more: Value) -> Result<()> {
    let mut spec = json!({
        "nodeName": "n1",
        "terminationGracePeriodSeconds": 0,
        "containers": [{
            "name": "main", "image": "highwater.local/workload:dev",
            "command": ["sh", "-c", "echo started; exec sleep 3600"],
        }],
    });
    if let (Some(spec), Value::Object(more)) = (spec.as_object_mut(), more) {
        spec.extend(more);
    }
    let pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec});
    pods.patch(name, &manager(), &Patch::Apply(pod)).await?;
    Ok(())
}

async fn running(pods: &Api<Pod>, name: &str) -> Result<Pod> {
    eventually(&format!("pod {name} to run"), SOON, async || {
        let pod = pods.get(name).await?;
        let phase = pod.status.as_ref().and_then(|status| status.phase.clone()).unwrap_or_default();
        ensure!(phase == "Running", "it is {phase}");
        Ok(pod)
    })
    .await
}

#[test]
#[ignore = "needs a cluster that is up"]
fn a_pod_runs_prints_and_answers_exec() -> Result<()> {
    test("cluster-pod", async |cluster, pods| {
        run(pods, "pod", json!({})).await?;
        running(pods, "pod").await?;
        // It runs from the start of its process on; what that prints comes a moment later.
        eventually("the pod's line", SOON, async || {
            let log = cluster.logs("cluster-pod", "pod", None, 10).await?;
            ensure!(log == "started\n", "its log is {log:?}");
            Ok(())
        })
        .await?;
        let cgroup =
            cluster.kubectl(["exec", "-n", "cluster-pod", "pod", "--", "cat", "/proc/self/cgroup"]).await?;
        ensure!(cgroup.contains("/kubepods/besteffort/pod"), "an unusual cgroup: {cgroup}");
        Ok(())
    })
}

#[test]
#[ignore = "needs a cluster that is up"]
fn a_pod_of_the_host_sees_the_processes_of_its_node_alone() -> Result<()> {
    test("cluster-pid", async |cluster, pods| {
        run(pods, "pod", json!({"hostPID": true})).await?;
        running(pods, "pod").await?;
        let seen = cluster.kubectl(["exec", "-n", "cluster-pid", "pod", "--", "ps", "-o", "args"]).await?;
        ensure!(seen.contains("--hostname-override=n1"), "the node's kubelet is not there: {seen}");
        ensure!(!seen.contains("kube-apiserver"), "the host's processes are there: {seen}");
        Ok(())
    })
}

#[test]
#[ignore = "needs a cluster that is up"]
fn a_killed_scheduler_stays_down_until_it_is_started() -> Result<()> {
    test("cluster-kill", async |cluster, pods| {
        cluster.kill("kube-scheduler").await?;
        run(pods, "pod", json!({"nodeName": null, "nodeSelector": {"kubernetes.io/hostname": "n1"}})).await?;
        let state = cluster.control(highwater_e2e::control::Request::Status).await?;
        let scheduler = state.iter().find(|component| component.name == "kube-scheduler");
        ensure!(scheduler.is_some_and(|it| it.pid.is_none() && !it.wanted), "it is {scheduler:?}");
        cluster.start("kube-scheduler").await?;
        running(pods, "pod").await.map(drop)
    })
}

#[test]
#[ignore = "needs a cluster that is up"]
fn pods_outlive_the_api_server_and_everything_comes_back_with_it() -> Result<()> {
    test("cluster-api", async |cluster, pods| {
        run(pods, "pod", json!({})).await?;
        let before = running(pods, "pod").await?;
        cluster.stop("kube-apiserver").await?;
        cluster.get_raw("readyz").await.expect_err("nobody answers for a stopped server");
        cluster.start("kube-apiserver").await?;
        cluster.api_ready().await?;
        let after = running(pods, "pod").await?;
        assert_eq!(after.metadata.uid, before.metadata.uid);
        run(pods, "next", json!({"nodeName": null})).await?;
        running(pods, "next").await.map(drop)
    })
}

#[test]
#[ignore = "needs a cluster that is up"]
fn a_paused_api_server_answers_again_once_resumed() -> Result<()> {
    test("cluster-pause", async |cluster, _| {
        cluster.pause("kube-apiserver").await?;
        let silence = tokio::time::timeout(Duration::from_millis(500), cluster.get_raw("readyz")).await;
        cluster.resume("kube-apiserver").await?;
        ensure!(silence.is_err(), "it answered while it was paused: {silence:?}");
        cluster.api_ready().await
    })
}

#[test]
#[ignore = "needs a cluster that is up"]
fn a_rebooted_node_restarts_its_pods() -> Result<()> {
    test("cluster-reboot", async |cluster, pods| {
        run(pods, "pod", json!({})).await?;
        running(pods, "pod").await?;
        cluster.reboot("n1").await?;
        eventually("the pod's container to run again", SOON, async || {
            let status = pods.get("pod").await?.status.and_then(|status| status.container_statuses);
            let container = status.and_then(|mut all| all.pop()).context("it has no status")?;
            ensure!(container.restart_count > 0 && container.ready, "it is {container:?}");
            Ok(())
        })
        .await
    })
}

#[test]
#[ignore = "needs a cluster that is up"]
fn the_fleet_has_as_many_ready_nodes_as_asked_for() -> Result<()> {
    test("cluster-fleet", async |cluster, pods| {
        let nodes: Api<Node> = Api::all(cluster.client().await?);
        let names = cluster.fleet(3).await?;
        for name in &names {
            eventually(&format!("{name} to be Ready"), SOON, async || {
                let conditions = nodes.get(name).await?.status.and_then(|status| status.conditions);
                let ready = conditions.into_iter().flatten().find(|condition| condition.type_ == "Ready");
                ready.filter(|condition| condition.status == "True").context("it is not")
            })
            .await?;
        }
        let tolerations = json!([{"key": "kwok.x-k8s.io/node", "operator": "Exists"}]);
        run(pods, "pod", json!({"nodeName": "f3", "tolerations": tolerations})).await?;
        running(pods, "pod").await?;
        pods.delete("pod", &DeleteParams::default()).await?;
        cluster.fleet(0).await?;
        ensure!(nodes.get_opt("f3").await?.is_none(), "f3 is still there");
        Ok(())
    })
}
