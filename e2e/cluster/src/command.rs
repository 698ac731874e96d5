//! Running other programs, with errors that carry what they said.

use std::process::{Command, Output};

use anyhow::{Context, Result, bail};

/// Runs a program to its end; its standard output, or an error with what it wrote.
pub(crate) fn output(command: &mut Command) -> Result<String> {
    let name = display(command);
    check(&name, command.output().with_context(|| format!("starting {name}"))?)
}

/// Runs a program with our own standard output and error.
pub(crate) fn run(command: &mut Command) -> Result<()> {
    let name = display(command);
    let status = command.status().with_context(|| format!("starting {name}"))?;
    if !status.success() {
        bail!("`{name}` ended with {status}");
    }
    Ok(())
}

/// The output of a program that has ended, or an error with what it wrote.
pub(crate) fn check(name: &str, output: Output) -> Result<String> {
    if !output.status.success() {
        let said = [output.stdout, output.stderr].concat();
        bail!("`{name}` ended with {}:\n{}", output.status, String::from_utf8_lossy(&said).trim());
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// The command line, for messages.
pub(crate) fn display(command: &Command) -> String {
    std::iter::once(command.get_program())
        .chain(command.get_args())
        .map(|part| part.to_string_lossy())
        .collect::<Vec<_>>()
        .join(" ")
}
