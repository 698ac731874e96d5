//! Certificates and kubeconfigs: one authority, an identity for each component.

use std::fs;

use anyhow::{Context, Result};
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa, KeyPair,
    KeyUsagePurpose,
};

use crate::{paths::Paths, paths::write, spec::Spec};

/// One certificate to issue.
#[derive(Debug, PartialEq, Eq)]
struct Identity {
    /// File name, and name of the kubeconfig.
    name: String,
    /// Kubernetes user (the certificate's common name).
    user: String,
    /// Kubernetes group (the certificate's organisation).
    group: Option<&'static str>,
    /// Names and addresses that it serves under; empty for clients.
    serves: Vec<String>,
}

/// Issues every certificate and writes a kubeconfig for each client.
pub(crate) fn issue(paths: &Paths, spec: &Spec) -> Result<()> {
    let mut params = CertificateParams::default();
    params.distinguished_name.push(DnType::CommonName, "highwater-e2e");
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::DigitalSignature];
    let authority = CertifiedIssuer::self_signed(params, KeyPair::generate()?)?;
    write(&paths.pki().join("ca.crt"), authority.pem())?;
    let tokens = KeyPair::generate()?;
    write(&paths.pki().join("service-accounts.key"), tokens.serialize_pem())?;
    write(&paths.pki().join("service-accounts.pub"), tokens.public_key_pem())?;
    for identity in identities(spec) {
        let key = KeyPair::generate()?;
        let mut params = CertificateParams::new(identity.serves.clone())
            .with_context(|| format!("certificate of {}", identity.name))?;
        params.distinguished_name.push(DnType::CommonName, &identity.user);
        if let Some(group) = identity.group {
            params.distinguished_name.push(DnType::OrganizationName, group);
        }
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages =
            vec![ExtendedKeyUsagePurpose::ClientAuth, ExtendedKeyUsagePurpose::ServerAuth];
        let certificate = params.signed_by(&key, &authority)?;
        write(&paths.pki().join(format!("{}.crt", identity.name)), certificate.pem())?;
        write(&paths.pki().join(format!("{}.key", identity.name)), key.serialize_pem())?;
        write(&paths.kubeconfig(&identity.name), kubeconfig(paths, &identity.name))?;
    }
    restrict(paths)
}

/// The keys open the whole cluster to whoever reads them.
fn restrict(paths: &Paths) -> Result<()> {
    use std::os::unix::fs::PermissionsExt as _;
    fs::set_permissions(paths.pki(), fs::Permissions::from_mode(0o700)).context("protecting the keys")
}

fn identities(spec: &Spec) -> Vec<Identity> {
    let client = |name: &str, user: &str, group| Identity {
        name: name.to_owned(),
        user: user.to_owned(),
        group,
        serves: Vec::new(),
    };
    let mut all = vec![
        Identity {
            serves: ["127.0.0.1", "10.96.0.1", "10.222.0.1", "localhost", "kubernetes.default.svc"]
                .map(str::to_owned)
                .to_vec(),
            ..client("kube-apiserver", "kube-apiserver", None)
        },
        client("admin", "admin", Some("system:masters")),
        client("kubelet-client", "kube-apiserver-kubelet-client", Some("system:masters")),
        client("kube-controller-manager", "system:kube-controller-manager", None),
        client("kube-scheduler", "system:kube-scheduler", None),
        client("kube-proxy", "system:kube-proxy", None),
    ];
    all.extend(spec.nodes().map(|node| Identity {
        serves: vec![node.address(), node.name()],
        ..client(&format!("kubelet-{node}"), &format!("system:node:{node}"), Some("system:nodes"))
    }));
    all
}

fn kubeconfig(paths: &Paths, identity: &str) -> String {
    let pki = paths.pki();
    let pki = pki.display();
    format!(
        "apiVersion: v1
kind: Config
clusters: [{{name: e2e, cluster: {{server: \"https://10.222.0.1:6443\", certificate-authority: \"{pki}/ca.crt\"}}}}]
users: [{{name: {identity}, user: {{client-certificate: \"{pki}/{identity}.crt\", client-key: \"{pki}/{identity}.key\"}}}}]
contexts: [{{name: e2e, context: {{cluster: e2e, user: {identity}}}}}]
current-context: e2e
"
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::paths::ClusterId;

    #[test]
    fn every_node_has_an_identity_that_the_node_authorizer_knows() {
        let all = identities(&Spec { nodes: 2, ..Spec::default() });
        let kubelet = all.iter().find(|identity| identity.name == "kubelet-n2").unwrap();
        assert_eq!(kubelet.user, "system:node:n2");
        assert_eq!(kubelet.group, Some("system:nodes"));
        assert_eq!(kubelet.serves, ["10.222.0.2", "n2"]);
    }

    #[test]
    fn certificates_and_kubeconfigs_are_written_for_all() {
        let dir = tempfile::tempdir().unwrap();
        let paths = Paths {
            id: ClusterId::default(),
            state: dir.path().to_owned(),
            data: dir.path().to_owned(),
            cache: dir.path().to_owned(),
            repository: dir.path().to_owned(),
        };
        issue(&paths, &Spec::default()).unwrap();
        for identity in identities(&Spec::default()) {
            let pem = fs::read_to_string(paths.pki().join(format!("{}.crt", identity.name))).unwrap();
            assert!(pem.starts_with("-----BEGIN CERTIFICATE-----"));
            assert!(fs::read_to_string(paths.kubeconfig(&identity.name)).unwrap().contains(&identity.name));
        }
    }
}
