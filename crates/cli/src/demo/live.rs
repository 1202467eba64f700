//! The terminal while a demo runs: about ten frames a second, keys, and a clean way out.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, TryRecvError};
use std::time::Duration;

use anyhow::Context as _;
use ratatui::DefaultTerminal;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEventKind, KeyModifiers};

use super::run::{Ending, Show, Story, Update, broke_off};
use super::screen::{self, Look, Picture};
use super::view::View;

/// Ten frames a second look smooth and cost little.
const FRAME: Duration = Duration::from_millis(100);
/// A run that is over by then needs no screen.
const PATIENCE: Duration = Duration::from_millis(400);
/// The last frame stays so long, so that the eye sees the bar full.
const LAST_FRAME: Duration = Duration::from_millis(1500);

/// Shows it until the end, or until the user leaves.
pub(super) fn show(show: &Show, story: &Story, look: Look) -> anyhow::Result<Ending> {
    let told_to_end = Arc::default();
    signal_hook::flag::register(signal_hook::consts::SIGTERM, Arc::clone(&told_to_end))
        .context("cannot listen for SIGTERM")?;
    let mut screen = Screen { show, story, look, view: None, begun: false, told_to_end };
    if let Some(ending) = screen.before_the_first_frame()? {
        return Ok(ending);
    }
    let mut terminal = ratatui::try_init().context("cannot draw on this terminal")?;
    let result = screen.until_the_end(&mut terminal);
    ratatui::try_restore().context("cannot restore the terminal (the command reset does)")?;
    result
}

struct Screen<'a> {
    show: &'a Show,
    story: &'a Story,
    look: Look,
    view: Option<Box<View>>,
    begun: bool,
    /// SIGTERM came. Without this the terminal would be left in its raw state.
    told_to_end: Arc<AtomicBool>,
}

impl Screen<'_> {
    fn before_the_first_frame(&mut self) -> anyhow::Result<Option<Ending>> {
        let waited = crate::stopwatch::Stopwatch::start();
        loop {
            match self.show.updates.recv_timeout(PATIENCE.saturating_sub(waited.elapsed())) {
                Ok(update) => {
                    if let Some(ending) = self.take_in(update)? {
                        return Ok(Some(ending));
                    }
                }
                Err(RecvTimeoutError::Timeout) => return Ok(None),
                Err(RecvTimeoutError::Disconnected) => return Err(broke_off()),
            }
        }
    }

    fn until_the_end(&mut self, terminal: &mut DefaultTerminal) -> anyhow::Result<Ending> {
        loop {
            self.show.ask();
            let ending = self.news()?;
            let picture = match &self.view {
                Some(view) if self.begun => Picture::Upgrade { view, now: self.show.now() },
                _ => Picture::SetUp { nodes: self.story.nodes },
            };
            terminal.draw(|frame| screen::draw(frame, &picture, self.look)).context("cannot draw")?;
            if let Some(ending) = ending {
                let paced = self.story.speed.is_some();
                if paced && event::poll(LAST_FRAME).context("cannot read the keyboard")? {
                    drop(event::read());
                }
                return Ok(ending);
            }
            if user_leaves()? || self.told_to_end.load(Ordering::Relaxed) {
                return Ok(Ending::LeftByUser);
            }
        }
    }

    /// Takes in all that came since the last frame.
    fn news(&mut self) -> anyhow::Result<Option<Ending>> {
        loop {
            match self.show.updates.try_recv() {
                Ok(update) => {
                    if let Some(ending) = self.take_in(update)? {
                        return Ok(Some(ending));
                    }
                }
                Err(TryRecvError::Empty) => return Ok(None),
                Err(TryRecvError::Disconnected) => return Err(broke_off()),
            }
        }
    }

    fn take_in(&mut self, update: Update) -> anyhow::Result<Option<Ending>> {
        match update {
            // Views from before are of the set-up.
            Update::Begins => (self.begun, self.view) = (true, None),
            Update::Moved(_) | Update::Decided(_) => {}
            Update::View(view) => self.view = Some(view),
            Update::Ended(result) => return result.map(|figures| Some(Ending::Played(figures))),
        }
        Ok(None)
    }
}

/// Waits for the next frame; `true` if `q` or ctrl-c came first. A resize needs nothing: the next frame fits.
fn user_leaves() -> anyhow::Result<bool> {
    if !event::poll(FRAME).context("cannot read the keyboard")? {
        return Ok(false);
    }
    let Event::Key(key) = event::read().context("cannot read the keyboard")? else { return Ok(false) };
    let ctrl_c = key.code == KeyCode::Char('c') && key.modifiers.contains(KeyModifiers::CONTROL);
    let quit = matches!(key.code, KeyCode::Char('q') | KeyCode::Esc);
    Ok(key.kind == KeyEventKind::Press && (ctrl_c || quit))
}
