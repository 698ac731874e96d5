//! Installing the product by its own charts, as any user would.

use std::{
    ffi::OsString,
    path::PathBuf,
    process::{Command, Output},
};

use anyhow::{Context, Result};

use crate::{Cluster, command, images};

/// Namespace of the release.
pub const NAMESPACE: &str = "highwater-system";

/// What is installed, in this order: the release's name is its chart's.
const RELEASES: [&str; 2] = ["highwater-crds", "highwater"];

impl Cluster {
    /// Installs or upgrades both charts with the values of the test cluster, and waits until all
    /// is ready. Pods whose image has changed are replaced.
    pub async fn install(&self) -> Result<()> {
        self.install_with(&[]).await
    }

    /// The same with values of one's own on top, from files.
    pub async fn install_with(&self, values: &[PathBuf]) -> Result<()> {
        for release in RELEASES {
            let chart = self.paths.repository.join("charts").join(release);
            let mut helm = self.helm_command();
            helm.args(["upgrade", "--install", release]).arg(chart);
            helm.args(["--namespace", NAMESPACE, "--create-namespace", "--wait", "--timeout", "120s"]);
            if release == "highwater" {
                helm.args(self.values(values)?);
            }
            run(helm).await.with_context(|| format!("installing {release}"))?;
        }
        Ok(())
    }

    /// Uninstalls the product, but not its kinds: objects of those stay.
    pub async fn uninstall(&self) -> Result<()> {
        let mut helm = self.helm_command();
        helm.args(["uninstall", "highwater", "--namespace", NAMESPACE, "--wait", "--timeout", "120s"]);
        run(helm).await.map(drop)
    }

    fn values(&self, more: &[PathBuf]) -> Result<Vec<OsString>> {
        let own = self.paths.repository.join("e2e/cluster/values.yaml");
        let mut arguments = Vec::new();
        for file in std::iter::once(&own).chain(more) {
            arguments.extend(["--values".into(), file.into()]);
        }
        // The tag stays the same when an image changes; the digest makes new pods of it.
        for (part, digest) in images::digests(&self.paths)? {
            let value = format!("{part}.podAnnotations.highwater\\.dev/image-digest={digest}");
            arguments.extend(["--set-string".into(), value.into()]);
        }
        Ok(arguments)
    }
}

async fn run(command: Command) -> Result<String> {
    let name = command::display(&command);
    let output: Output = tokio::process::Command::from(command).kill_on_drop(true).output().await?;
    command::check(&name, output)
}
