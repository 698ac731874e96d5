//! etcd, API server, controller manager and scheduler, with the true authorizers and admission
//! plugins: faults in access rights are to be found here.

use anyhow::Result;

use crate::{
    control::Component,
    namespace::Place,
    paths::{Paths, write},
};

/// What is audited: every write by Highwater's own service accounts, once it is answered. Tests
/// count these: writes of a steady fleet, evictions of one pod.
const AUDIT_POLICY: &str = "apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules:
- level: Metadata
  userGroups: ['system:serviceaccounts:highwater-system']
  verbs: [create, update, patch, delete, deletecollection]
- level: None
";

/// Writes the API server's configuration files.
pub(crate) fn prepare(paths: &Paths) -> Result<()> {
    write(&paths.state.join("audit-policy.yaml"), AUDIT_POLICY)
}

/// The store and the API server; the second waits for the first by itself.
pub(crate) fn servers(paths: &Paths) -> Vec<Component> {
    let pki = paths.pki();
    let pki = pki.display();
    vec![
        component(
            paths,
            "etcd",
            &[
                format!("--data-dir={}", paths.data.join("etcd").display()),
                "--listen-client-urls=http://127.0.0.1:2379".into(),
                "--advertise-client-urls=http://127.0.0.1:2379".into(),
                "--listen-peer-urls=http://127.0.0.1:2380".into(),
                // The machine's crash is the test cluster's end anyway.
                "--unsafe-no-fsync".into(),
            ],
        ),
        component(
            paths,
            "kube-apiserver",
            &[
                "--etcd-servers=http://127.0.0.1:2379".into(),
                "--secure-port=6443".into(),
                "--bind-address=0.0.0.0".into(),
                "--advertise-address=10.222.0.1".into(),
                format!("--tls-cert-file={pki}/kube-apiserver.crt"),
                format!("--tls-private-key-file={pki}/kube-apiserver.key"),
                format!("--client-ca-file={pki}/ca.crt"),
                format!("--service-account-key-file={pki}/service-accounts.pub"),
                format!("--service-account-signing-key-file={pki}/service-accounts.key"),
                "--service-account-issuer=https://kubernetes.default.svc".into(),
                "--service-cluster-ip-range=10.96.0.0/16".into(),
                "--authorization-mode=Node,RBAC".into(),
                "--enable-admission-plugins=NodeRestriction".into(),
                format!("--kubelet-client-certificate={pki}/kubelet-client.crt"),
                format!("--kubelet-client-key={pki}/kubelet-client.key"),
                format!("--kubelet-certificate-authority={pki}/ca.crt"),
                // Node names resolve nowhere.
                "--kubelet-preferred-address-types=InternalIP".into(),
                "--allow-privileged=true".into(),
                format!("--audit-policy-file={}", paths.state.join("audit-policy.yaml").display()),
                format!("--audit-log-path={}", paths.audit_log().display()),
                "--audit-log-mode=blocking".into(),
            ],
        ),
    ]
}

/// The control loops. They run once each, so they elect no leader and write no leases.
pub(crate) fn controllers(paths: &Paths) -> Vec<Component> {
    let pki = paths.pki();
    let pki = pki.display();
    let identity = |name: &str| {
        let kubeconfig = paths.kubeconfig(name);
        let kubeconfig = kubeconfig.display();
        vec![
            format!("--kubeconfig={kubeconfig}"),
            format!("--authentication-kubeconfig={kubeconfig}"),
            format!("--authorization-kubeconfig={kubeconfig}"),
            "--bind-address=127.0.0.1".into(),
            "--leader-elect=false".into(),
        ]
    };
    let mut manager = identity("kube-controller-manager");
    manager.extend([
        "--use-service-account-credentials=true".into(),
        format!("--service-account-private-key-file={pki}/service-accounts.key"),
        format!("--root-ca-file={pki}/ca.crt"),
    ]);
    vec![
        component(paths, "kube-controller-manager", &manager),
        component(paths, "kube-scheduler", &identity("kube-scheduler")),
    ]
}

fn component(paths: &Paths, name: &str, arguments: &[String]) -> Component {
    let place = Place::Network(paths.id.network());
    Component::new(name, place, paths.program(name), arguments.iter().cloned())
}
