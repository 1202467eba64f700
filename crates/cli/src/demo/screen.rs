//! One frame: a view and a moment in, a drawn screen out. Fits what there is; sentences are cut, never wrapped.
//!
//! ```text
//!  title, bar, limits            always
//!  nodes in trouble or moving    as many as fit
//!  the next ones, groups         what is left of the upper part
//!  the fleet, a glyph per node   where there is plenty of room
//!  what happened last            about a third, at the bottom
//! ```

use std::fmt::Write as _;

use jiff::Timestamp;
use pitcrew_core::contract::State;
use pitcrew_core::reason::Kind;
use ratatui::Frame;
use ratatui::layout::{Constraint, Layout};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::Paragraph;

use super::record::{Place, Tally};
use super::run::{FROM, TO};
use super::view::{Row, View};
use crate::text::{clock, cut, fit, grouped, long_clock, ranges};

/// From here on there is room for more columns.
const WIDE: usize = 110;
/// From here on there is room for a picture of the fleet.
const TALL: usize = 32;
/// Below this, there is no room for what happened last.
const SHORT: usize = 16;
/// The picture of the fleet takes at most so many lines.
const FLEET_LINES_MAX: usize = 10;
/// All states that last fit into it.
const STATE_WIDTH: usize = 21;
/// Title, bar, limits and what the rollout is about.
const HEAD_LINES: usize = 4;
/// The groups of those that wait and those that are done, and a blank line.
const GROUP_LINES: usize = 3;
/// Of the queue, never more lines than this.
const NEXT_MAX: usize = 8;

/// How to draw.
#[derive(Clone, Copy, Debug)]
pub(super) struct Look {
    /// Colour says what the glyphs say too.
    pub(super) colours: bool,
}

/// What to draw.
pub(super) enum Picture<'a> {
    /// The fleet is being built.
    SetUp {
        /// How many nodes.
        nodes: usize,
    },
    /// The upgrade at a moment.
    Upgrade {
        /// How things stand.
        view: &'a View,
        /// The moment.
        now: Timestamp,
    },
}

/// Draws it.
pub(super) fn draw(frame: &mut Frame<'_>, picture: &Picture<'_>, look: Look) {
    let area = frame.area();
    let (width, height) = (usize::from(area.width), usize::from(area.height));
    let (top, bottom) = match picture {
        Picture::SetUp { nodes } => {
            let title = format!(" pitcrew demo · {} GPU nodes", grouped(nodes));
            let what = format!(" building a simulated cluster on driver {FROM} …");
            (vec![Line::from(title).style(Style::new().bold()), Line::from(what)], Vec::new())
        }
        Picture::Upgrade { view, now } => {
            let page = Page { view, now: *now, look, width, height };
            (page.top(), page.bottom())
        }
    };
    let below = u16::try_from(bottom.len()).unwrap_or(u16::MAX);
    let [above, below] = Layout::vertical([Constraint::Min(0), Constraint::Length(below)]).areas(area);
    frame.render_widget(Paragraph::new(top), above);
    frame.render_widget(Paragraph::new(bottom), below);
}

impl Look {
    fn paint(self, colour: Color) -> Style {
        if self.colours { Style::new().fg(colour) } else { Style::new() }
    }
    fn dim(self) -> Style {
        if self.colours { Style::new().add_modifier(Modifier::DIM) } else { Style::new() }
    }
    fn kind(self, kind: Kind) -> Style {
        match kind {
            Kind::Done => self.paint(Color::Green),
            Kind::Moving => self.paint(Color::Cyan),
            Kind::Waiting => self.dim(),
            Kind::Paused | Kind::Blocked => self.paint(Color::Yellow),
            Kind::Failed => self.paint(Color::Red),
        }
    }
}

fn glyph(kind: Kind) -> &'static str {
    match kind {
        Kind::Done => "✔",
        Kind::Moving => "▸",
        Kind::Waiting => "·",
        Kind::Paused => "⏸",
        Kind::Blocked => "!",
        Kind::Failed => "✖",
    }
}

fn kind_of(place: Place) -> Kind {
    match place {
        Place::Done => Kind::Done,
        Place::Moving => Kind::Moving,
        Place::Waiting => Kind::Waiting,
        Place::Failed => Kind::Failed,
    }
}

/// One frame of an upgrade.
struct Page<'a> {
    view: &'a View,
    now: Timestamp,
    look: Look,
    width: usize,
    height: usize,
}

impl Page<'_> {
    /// What happened last gets what the table leaves, a third at least. It must not jump, so the table's usual size
    /// counts: a line for each slot.
    fn bottom_lines(&self) -> usize {
        if self.height < SHORT {
            return 0;
        }
        let slots = self.view.slots.at_most().min(self.view.names.len());
        let table = 1 + slots.max(self.view.rows.len()) + self.next_max() + GROUP_LINES;
        let top = HEAD_LINES + table + self.fleet_lines();
        self.height.saturating_sub(top).max(self.height / 3)
    }

    fn top(&self) -> Vec<Line<'static>> {
        let room = self.height.saturating_sub(self.bottom_lines());
        let headline =
            self.view.headline.as_ref().map(|what| format!(" {}", fit(what, self.width.saturating_sub(2))));
        let headline = Line::from(headline.unwrap_or_default()).style(Style::new().bold());
        let mut lines = vec![self.title(), self.bar(), self.limits(), headline];
        lines.extend(self.table(room.saturating_sub(HEAD_LINES + self.fleet_lines())));
        if self.fleet_lines() > 0 {
            lines.push(Line::default());
            lines.extend(self.fleet());
        }
        lines.truncate(room);
        lines
    }

    /// Left and right, with the space between them. The left is the longest that fits, or is cut.
    fn ends_of_line(&self, lefts: &[String], right: &str) -> String {
        let length = |text: &str| text.chars().count();
        let room = self.width.saturating_sub(length(right) + 2);
        let fitting = lefts.iter().find(|left| length(left) < room).or(lefts.last());
        let left = cut(fitting.map_or("", String::as_str), room);
        let space = self.width.saturating_sub(length(&left) + length(right) + 2).max(1);
        format!(" {left}{:space$}{right}", "")
    }

    fn seconds_since(&self, since: Timestamp) -> i64 {
        self.now.duration_since(since).as_secs()
    }

    fn title(&self) -> Line<'static> {
        let left =
            format!("pitcrew demo · {} GPU nodes · driver {FROM} → {TO}", grouped(self.view.names.len()));
        let right = format!("virtual {}", long_clock(self.seconds_since(self.view.began)));
        Line::from(self.ends_of_line(&[left], &right)).style(Style::new().bold())
    }

    fn bar(&self) -> Line<'static> {
        let Tally { done, moving, waiting, failed } = self.view.tally;
        let total = self.view.tally.total().max(1);
        let counts = [
            (Kind::Done, format!("  {}/{} done", grouped(done), grouped(total)), true),
            (Kind::Moving, format!("   {} moving", grouped(moving)), moving > 0),
            (Kind::Waiting, format!("   {} waiting", grouped(waiting)), true),
            (Kind::Failed, format!("   {} failed", grouped(failed)), failed > 0),
        ];
        let text: usize = counts.iter().map(|(_, text, _)| text.chars().count()).sum();
        let cells = self.width.saturating_sub(text + 2).min(80);
        let mut spans = vec![Span::raw(" ")];
        let parts = [(Kind::Done, "█", done), (Kind::Failed, "▒", failed), (Kind::Moving, "▓", moving)];
        let (mut nodes, mut drawn) = (0, 0);
        for (kind, cell, number) in parts {
            nodes += number;
            let until = nodes * cells / total;
            spans.push(Span::styled(cell.repeat(until - drawn), self.look.kind(kind)));
            drawn = until;
        }
        spans.push(Span::styled("░".repeat(cells - drawn), self.look.dim()));
        spans.extend(counts.into_iter().map(|(kind, text, lit)| {
            Span::styled(text, if lit { self.look.kind(kind) } else { self.look.dim() })
        }));
        Line::from(spans)
    }

    fn limits(&self) -> Line<'static> {
        let slots = &self.view.slots;
        let (written, nodes) = &slots.max_unavailable;
        let parallel =
            slots.max_parallel.map(|limit| format!(", maxParallelUpgrades {limit}")).unwrap_or_default();
        let limits = format!("of at most {} (maxUnavailable {written} = {nodes}{parallel})", slots.at_most());
        let eta = match self.view.ends {
            _ if self.view.is_over => "all done".to_owned(),
            Some(ends) => format!("ETA {}", clock(ends.duration_since(self.now).as_secs())),
            None => "ETA …".to_owned(),
        };
        let (out, at_most) = (slots.out, slots.at_most());
        let shorter = format!("out {out} of at most {at_most} ({written} = {nodes}{parallel})");
        let out = [format!("out now {out} {limits}"), format!("out {out} {limits}"), shorter];
        Line::from(self.ends_of_line(&out, &eta))
    }

    /// Trouble and movement, the next ones, and groups for all others.
    fn table(&self, room: usize) -> Vec<Line<'static>> {
        let view = self.view;
        let mut lines = vec![self.header()];
        let groups = usize::from(!view.waiting.is_empty()) + usize::from(!view.done.is_empty());
        let room = room.saturating_sub(lines.len() + groups);
        let all_fit = view.rows.len() <= room && view.more_rows == 0;
        let shown = if all_fit { view.rows.len() } else { room.saturating_sub(1).min(view.rows.len()) };
        lines.extend(view.rows.iter().take(shown).map(|row| self.row(row)));
        if !all_fit {
            let more = view.rows.len() - shown + view.more_rows;
            lines.push(self.group(Kind::Moving, &format!("{} more on their way", grouped(more)), &[]));
        }
        let next = room.saturating_sub(lines.len() - 1).min(self.next_max()).min(view.next.len());
        lines.extend(view.next.iter().take(next).map(|row| self.row(row)));
        if let Some(rest) = view.waiting.get(next..).filter(|rest| !rest.is_empty()) {
            let more = if next > 0 { " more" } else { "" };
            lines.push(self.group(Kind::Waiting, &format!("{}{more} waiting", grouped(rest.len())), rest));
        }
        if !view.done.is_empty() {
            lines.push(self.group(Kind::Done, &format!("{} done", grouped(view.done.len())), &view.done));
        }
        lines
    }

    /// How many of the queue are worth a line: those that can start together, if there is room.
    fn next_max(&self) -> usize {
        if self.height < TALL { 1 } else { self.view.slots.at_most().min(NEXT_MAX) }
    }

    fn node_width(&self) -> usize {
        self.view.names.iter().map(|name| name.as_str().len()).max().unwrap_or(4).clamp(4, 24)
    }

    /// Wide enough for any time that is shown: none is longer than the run.
    fn clock_width(&self) -> usize {
        clock(self.seconds_since(self.view.began)).len().max(5)
    }

    fn wide(&self) -> bool {
        self.width >= WIDE
    }

    fn header(&self) -> Line<'static> {
        let (node, time) = (self.node_width() + 2, self.clock_width());
        let more = if self.wide() { format!("  {:>7}  {:<11}", "visit", "driver") } else { String::new() };
        let text = format!(" {:node$}  {:STATE_WIDTH$}  {:>time$}{more}  why", "node", "state", "for");
        Line::from(cut(&text, self.width)).style(self.look.dim())
    }

    fn row(&self, row: &Row) -> Line<'static> {
        let style = self.look.kind(row.kind);
        let node = self.node_width();
        let name = cut(row.node.as_str(), node);
        let state = cut(row.state.as_str(), STATE_WIDTH);
        let (time, since) = (self.clock_width(), clock(self.seconds_since(row.since)));
        let mut text = format!(" {name:node$}  {state:STATE_WIDTH$}  {since:>time$}");
        if self.wide() {
            let visit = row.visit.map(|since| clock(self.seconds_since(since))).unwrap_or_default();
            let _ = write!(text, "  {visit:>7}  {:<11}", row.driver);
        }
        let used = text.chars().count() + 4;
        let why = format!("  {}", fit(&row.why, self.width.saturating_sub(used + 1)));
        let waiting = row.kind == Kind::Waiting;
        let text_style = if waiting { style } else { Style::new() };
        Line::from(vec![
            Span::styled(format!(" {}", glyph(row.kind)), style),
            Span::styled(text, text_style),
            Span::styled(why, if row.kind >= Kind::Paused { style } else { text_style }),
        ])
    }

    fn group(&self, kind: Kind, what: &str, picked: &[usize]) -> Line<'static> {
        let column = self.node_width() + STATE_WIDTH + 2;
        let names = ranges(&self.view.names, picked, self.width.saturating_sub(column + 7));
        let style = self.look.kind(kind);
        Line::from(vec![
            Span::styled(format!(" {} {what:column$}  ", glyph(kind)), style),
            Span::styled(names, self.look.dim()),
        ])
    }

    /// How many lines the picture of the fleet takes, with the blank one above it; none if there is no room.
    fn fleet_lines(&self) -> usize {
        let lines = self.view.places.len().div_ceil(self.fleet_columns());
        let fits = self.height >= TALL && lines <= FLEET_LINES_MAX.min(self.height / 4);
        if fits { lines + 1 } else { 0 }
    }

    fn fleet_columns(&self) -> usize {
        // Multiples of ten are easy to count.
        (self.width.saturating_sub(2) / 11 * 10).max(10)
    }

    /// One glyph per node, in the order of their names, in tens.
    fn fleet(&self) -> Vec<Line<'static>> {
        let line = |places: &[Place]| {
            let mut spans = vec![Span::raw(" ")];
            for ten in places.chunks(10) {
                for same in ten.chunk_by(|a, b| a == b) {
                    let kind = same.first().map_or(Kind::Waiting, |place| kind_of(*place));
                    spans.push(Span::styled(glyph(kind).repeat(same.len()), self.look.kind(kind)));
                }
                spans.push(Span::raw(" "));
            }
            Line::from(spans)
        };
        self.view.places.chunks(self.fleet_columns()).map(line).collect()
    }

    /// What happened last, the newest on top.
    fn bottom(&self) -> Vec<Line<'static>> {
        let room = self.bottom_lines();
        if room < 3 {
            return Vec::new();
        }
        let rule = format!(" {} q leaves ", "─".repeat(self.width.saturating_sub(12)));
        let mut lines = vec![Line::from(rule).style(self.look.dim())];
        let (node, time) = (self.node_width(), self.clock_width());
        lines.extend(self.view.recent.iter().take(room - 1).map(|event| {
            let name = cut(event.node.as_str(), node);
            let state = cut(event.to.as_str(), STATE_WIDTH);
            let start = format!(" {:>time$}  {name:node$}  {state:STATE_WIDTH$}  ", clock(event.at));
            let words = fit(&event.words, self.width.saturating_sub(start.chars().count() + 1));
            let kind = match event.to {
                State::UpgradeDone => Some(Kind::Done),
                State::UpgradeFailed => Some(Kind::Failed),
                _ => None,
            };
            let style = kind.map_or_else(|| self.look.dim(), |kind| self.look.kind(kind));
            Line::from(format!("{start}{words}")).style(style)
        }));
        lines.resize(room, Line::default());
        lines
    }
}

#[cfg(test)]
mod tests;
