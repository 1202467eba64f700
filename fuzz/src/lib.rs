//! What must hold for any input from outside, one function per kind of input. `cargo xtask fuzz` drives them with
//! libFuzzer, guided by coverage; an ordinary test replays what is in `corpus`.
//!
//! ```text
//!  policies.rs   policy objects of every source: resolved or refused with a sentence
//!  records.rs    the annotations on a node: read, written, read again; a plan from whatever they say
//!  texts.rs      versions, image tags, selectors, amounts, durations, states
//!  requests.rs   requests to the embedded API: always answered; who is refused has changed nothing
//!  wire.rs       what the controller reads from the API: facts, and a plan from them
//!  world.rs      what must hold for a plan of any facts
//!  mutate.rs     new inputs from old ones, as JSON trees
//!  main.rs       libFuzzer's door
//! ```
//!
//! Inputs are text that people can read: JSON, or plain lines for `texts`. Each target panics when something is wrong.

mod mutate;
mod policies;
mod records;
mod requests;
mod texts;
mod wire;
mod world;

pub use mutate::Stock;

/// One kind of input.
#[derive(Clone, Copy)]
pub struct Target {
    /// Its name, and that of its directory in `corpus`.
    pub name: &'static str,
    /// Inputs are JSON, so they are changed as trees.
    pub is_json: bool,
    /// Panics if something does not hold for this input.
    pub run: fn(&str),
}

/// All kinds of input.
pub const TARGETS: [Target; 5] = [
    Target { name: "policies", is_json: true, run: policies::run },
    Target { name: "records", is_json: true, run: records::run },
    Target { name: "texts", is_json: false, run: texts::run },
    Target { name: "requests", is_json: true, run: requests::run },
    Target { name: "wire", is_json: true, run: wire::run },
];

impl Target {
    /// The target of this name.
    pub fn named(name: &str) -> Option<Self> {
        TARGETS.into_iter().find(|target| target.name == name)
    }

    /// Runs one input. What is not text is no input.
    pub fn feed(self, input: &[u8]) {
        if let Ok(text) = std::str::from_utf8(input) {
            (self.run)(text);
        }
    }
}
