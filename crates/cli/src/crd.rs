//! `pitcrew crd`: the custom resource definitions, ready for `kubectl apply -f -`.

use std::io::Write;
use std::process::ExitCode;

use anyhow::Context as _;
use serde_json::json;

use crate::terminal::Output;

/// What `pitcrew crd` takes.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Print a JSON List instead of YAML documents
    #[arg(short, long, value_enum)]
    output: Option<Output>,
}

/// Prints them.
pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let definitions = pitcrew_core::api::crds();
    let text = match args.output {
        Some(Output::Json) => {
            let list = json!({"apiVersion": "v1", "kind": "List", "items": definitions});
            format!("{}\n", serde_json::to_string_pretty(&list)?)
        }
        None => {
            let documents: Result<Vec<String>, _> = definitions.iter().map(serde_saphyr::to_string).collect();
            documents.context("cannot write the definitions as YAML")?.join("---\n")
        }
    };
    std::io::stdout().lock().write_all(text.as_bytes())?;
    Ok(ExitCode::SUCCESS)
}
