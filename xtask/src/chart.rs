//! `cargo xtask chart`: writes what the chart takes from elsewhere (definitions, alerts, dashboard) and the golden files
//! of what it renders to. The test that compares them does the writing, so that there is one list of them.

use anyhow::{Context as _, Result, bail};

use crate::cargo::cargo;
use crate::helm;

/// Writes them all.
pub(crate) fn write() -> Result<()> {
    helm::ensure()?;
    let mut test = cargo(&["test", "--quiet", "--workspace", "--test", "chart", "--", "written"]);
    if !test.env("PITCREW_WRITE_CHART", "1").status().context("start cargo")?.success() {
        bail!("not everything could be written, see above.");
    }
    println!("Written. `git diff charts` shows what is new.");
    Ok(())
}
