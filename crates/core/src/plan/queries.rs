//! What Prometheus says of a stage that bakes. It is asked once for every look; a look waits for its answers, and an answer
//! that is older than the look does not count.

use jiff::Timestamp;

use super::pool::View;
use super::proofs::Asked;
use crate::action::Action;
use crate::api::QueryStatus;
use crate::prometheus::{Answer, Query};
use crate::snapshot::Object;

/// What the queries of a stage say at one look.
pub(super) enum Heard {
    /// Not all of them have been answered.
    Waits,
    /// Each with its value, or why there is none.
    All {
        said: Vec<QueryStatus>,
        /// One is out of its bounds.
        missed: Option<String>,
    },
}

/// Listens to the answers since the look became `due`, and asks what nobody has asked since then.
pub(super) fn hear(view: &View<'_>, queries: &[Query], due: Timestamp, asked: &mut Asked) -> Heard {
    let (mut said, mut missed) = (Vec::with_capacity(queries.len()), None);
    for query in queries {
        let status = QueryStatus { name: query.name.clone(), value: None, message: None };
        let known = view.snapshot.answers.get(&query.question);
        // What was said in the future was said by a clock that was wrong.
        let counts = |answer: &&Answer| (due..=view.snapshot.now).contains(&answer.asked_at);
        match known.filter(counts).map(|answer| &answer.said) {
            None => ask(view, query, asked),
            Some(Ok(values)) => {
                missed = missed.or_else(|| query.missed(values));
                said.push(QueryStatus { value: Some(query.tightest(values).value), ..status });
            }
            Some(Err(why)) => said.push(QueryStatus { message: Some(why.clone()), ..status }),
        }
    }
    if said.len() < queries.len() { Heard::Waits } else { Heard::All { said, missed } }
}

fn ask(view: &View<'_>, query: &Query, asked: &mut Asked) {
    let action = Action::Ask { question: query.question.clone(), at: view.snapshot.now };
    let busy = view.snapshot.is_busy(&Object::Question(query.question.clone()));
    // Two queries may ask the same, for different bounds.
    if !busy && !asked.actions.contains(&action) {
        asked.actions.push(action);
    }
}

/// Why nothing can be said about the time before the last look.
pub(super) fn unjudged(said: &[QueryStatus]) -> Option<String> {
    let silent = said.iter().find_map(|query| Some((&query.name, query.message.as_ref()?)));
    silent.map(|(name, why)| format!("query {name} cannot be judged: {why}; that time does not count"))
}

/// A query of which nothing is known yet.
pub(super) fn unasked(queries: &[Query], said: &[QueryStatus]) -> Option<String> {
    let known = |query: &&Query| said.iter().any(|said| said.name == query.name);
    let missing = queries.iter().find(|query| !known(query))?;
    Some(format!("query {} has not been asked yet", missing.name))
}
