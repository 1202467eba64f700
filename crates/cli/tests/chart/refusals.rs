//! Bad values, and the sentence that people get.

use crate::render::{Outcome, must, name, printed, program, refusal, release, render};

/// Values, and what the answer must contain.
const SCHEMA: [(&str, &str); 8] = [
    ("controller.replica=3", "at '/controller': additional properties 'replica' not allowed"),
    ("feature.clients=false", "at '': additional properties 'feature' not allowed"),
    ("controller.replicas=two", "at '/controller/replicas': got string, want integer"),
    ("features.nvsentinel=off", "at '/features/nvsentinel': got string, want boolean"),
    (
        "postInstallHooks.dra.deployer=argo",
        "at '/postInstallHooks/dra/deployer': value must be one of 'helm', 'helmfile', 'flux', 'argocd'",
    ),
    (
        "postInstallHooks.dra.deadline=forever",
        "at '/postInstallHooks/dra/deadline': 'forever' does not match",
    ),
    ("image.repository=pitcrew:latest", "at '/image/repository': 'pitcrew:latest' does not match pattern"),
    ("image.digest=sha256:1234", "at '/image/digest': 'sha256:1234' does not match pattern"),
];

const TOGETHER: [(&str, &str); 3] = [
    (
        "controller.enabled=false",
        "Nothing to install: set controller.enabled or postInstallHooks.dra.enabled",
    ),
    ("postInstallHooks.dra.enabled=true", "The controller restarts the driver's clients itself: set"),
    (
        "postInstallHooks.dra.enabled=true,controller.enabled=false",
        "Set postInstallHooks.dra.operatorVersion or driverVersion",
    ),
];

/// The icon is a matter of taste, and all that lint has to say.
pub(crate) fn lint() -> Outcome {
    let said = printed(program("helm")?.args(["lint", "--strict", "charts/pitcrew"]))?;
    must(!said.contains("[WARNING]") && !said.contains("[ERROR]"), || said)
}

/// Each with the place of the mistake.
pub(crate) fn schema() -> Outcome {
    refused(&SCHEMA)
}

/// Each with a way out.
pub(crate) fn together() -> Outcome {
    refused(&TOGETHER)
}

fn refused(cases: &[(&str, &str)]) -> Outcome {
    for (values, sentence) in cases {
        let said = refusal(&["--set", values])?;
        must(said.contains(sentence), || format!("{values} is answered with: {said}"))?;
    }
    Ok(())
}

/// A Job's name has room for 63 characters, a release's for 53.
pub(crate) fn long_name() -> Outcome {
    let long = "a-release-with-the-longest-name-that-helm-will-let-in";
    let job = [
        "--values",
        "charts/pitcrew/examples/helm/values.yaml",
        "--set",
        "postInstallHooks.dra.deployer=argocd",
    ];
    for arguments in [&[][..], &job] {
        let (short, long) = (render(arguments)?, release(long, arguments)?);
        must(short.len() == long.len(), || "another name makes other objects".to_owned())?;
        for object in &long {
            let length = object["metadata"]["name"].as_str().unwrap_or_default().len();
            must((1..=63).contains(&length), || format!("{} is too long", name(object)))?;
        }
    }
    Ok(())
}
