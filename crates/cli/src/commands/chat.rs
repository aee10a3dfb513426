//! `kvist chat`: turns, branches, undo.
mod input;
mod wrap;

use crate::options::*;
use crate::{interrupt, json, output};
use anyhow::Context;
use input::{Entry, Input};
use kvist_cache::Refused;
use kvist_device::StepError;
use kvist_engine::Error;
use kvist_engine::chat::{Chat, Turn};
use kvist_engine::generate::{GenerationEnd, Limits, Observer};
use kvist_engine::memory::RECENT_SEQUENCES;
use kvist_engine::sampler::Sampler;
use kvist_engine::session::ModelSession;
use kvist_engine::speculate::{Counts, Speculator};
use serde::Serialize;
use std::io::IsTerminal;
use std::path::Path;
use wrap::Wrap;

#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    pub model: ModelArgs,
    #[command(flatten)]
    pub cache: CacheArgs,
    #[command(flatten)]
    keep: KeepArgs,
    #[command(flatten)]
    sampling: SamplingArgs,
    #[command(flatten)]
    speculation: SpeculationArgs,
    #[command(flatten)]
    saved: SavedArgs,
    /// Maximum tokens of an answer
    #[arg(short = 'n', long, default_value_t = 512, value_name = "TOKENS")]
    max_tokens: u32,
    /// End an answer where this text appears; may be given several times
    #[arg(long, value_name = "TEXT", value_parser = parse_stop)]
    stop: Vec<String>,
    /// System message: the model reads it first
    #[arg(long, value_name = "TEXT")]
    system: Option<String>,
    /// Do not save typed lines; without this, the last 1,000 lines are saved in kvist/chat-history in the user's state
    /// folder
    #[arg(long)]
    no_history: bool,
    /// Print one JSON document per turn, a line each
    #[arg(long)]
    json: bool,
}

const HELP: &str = "\
/fork [NAME]            continue in a new branch; nothing is copied
/branches               list them
/switch NAME            continue in another one
/drop NAME              delete one, and free the cells that only it uses
/cache                  the contents of the cache, by sequence
/undo                   remove the last question and its answer
/system TEXT            system message: the model reads it first
/save-transcript FILE   write this branch to a file
/help                   this list
/quit                   or end of input
//TEXT                  send /TEXT as a message";

/// Additional help where line editing is available.
const HELP_WITH_LINES: &str = "
a \\ at a line's end      continues on the next line
\\\\ at the end           is a \\, and ends the message
arrows, Ctrl-R          find what was typed before";

/// `kvist chat --json`, one line per turn
#[derive(Serialize)]
struct TurnReport<'a> {
    version: u32,
    branch: &'a str,
    user: &'a str,
    text: &'a str,
    /// The model's reasoning, if its format separates that from the answer.
    #[serde(skip_serializing_if = "str::is_empty")]
    reasoning: &'a str,
    finish: &'static str,
    reused_tokens: usize,
    prompt_tokens: usize,
    tokens: usize,
    decode_tokens_per_second: f64,
    /// What `--speculate` achieved in this turn.
    #[serde(skip_serializing_if = "Option::is_none")]
    speculation: Option<Counts>,
    /// With `--keep`: tokens removed from the cache so far.
    #[serde(skip_serializing_if = "Option::is_none")]
    removed_tokens: Option<u64>,
    kv_bytes: u64,
}

pub fn run(mut args: Args, quiet: bool) -> anyhow::Result<()> {
    // Branches need a kind that can share cells. `--kind` may name another one.
    let saved = args.saved.open()?;
    let asked = args.cache.kind.clone();
    args.cache.kind.get_or_insert_with(|| "cells".into());
    let opened = args.model.open(quiet)?;
    let mut sampler = args.sampling.sampler(&opened, args.sampling.seed())?;
    let model_defaults = args.sampling.of_the_model(&opened);
    opened.tokenizer().context("this model has no tokenizer (no tokenizer.json next to it)")?.check()?;
    if args.system.is_some() && opened.chat_template().is_none() {
        return Err(wrong_usage(
            "--system needs a model with a chat template; this one continues plain text",
        ));
    }
    let context = args.cache.context.unwrap_or(opened.config().context);
    args.cache.context = Some(context);
    let mut config = args.cache.config(opened.config(), u64::from(context))?;
    config.recent.sequences = RECENT_SEQUENCES;
    args.keep.prepare(&mut config, asked.as_deref())?;
    args.speculation.prepare(&mut config, asked.as_deref(), args.cache.context)?;
    let fingerprint = args.saved.fingerprint(saved.as_ref(), &opened)?;
    let what = (opened.config(), args.model.weights);
    let origin = args.saved.origin(fingerprint, saved.as_ref(), what, &config)?;
    let draft = args.speculation.open_draft(&opened, &args.model, quiet)?;
    let (model, _, draft) = args.speculation.load(&args.model, opened, draft, &config, 0, quiet)?;
    let speculator = args.speculation.speculator(draft.as_ref(), &model, &config, 1)?;
    interrupt::listen();
    let mut chat =
        Chat::new(ModelSession::new(&model, &registry(&args.model.compute.get()?), &config)?, None);
    chat.speculate(speculator);
    if args.system.is_some() {
        chat.set_system(args.system.clone()).map_err(|e| wrong_usage(e.to_string()))?;
    }
    if let Some((saved, origin)) = saved.as_ref().zip(origin.as_ref()) {
        if args.system.is_some() {
            return Err(wrong_usage("--system: the conversation has begun already; /system changes it"));
        }
        let resumed = match saved {
            Beginning::Session(saved) => chat.resume(saved, origin)?,
            Beginning::Prefix(prefix) => chat.begin_with(prefix, origin)?,
        };
        args.saved.note(quiet, resumed, saved);
    }
    drop(saved);
    let mut input = Input::new(!args.no_history)?;
    if !quiet {
        output::note(&format!("{}; /help lists the commands", model.name()));
        if !chat.has_template() {
            output::note("it has no chat template: what you type is continued as plain text");
        }
        model_defaults.iter().for_each(|line| output::note(line));
    }
    let talked = talk(&mut chat, &mut input, &mut sampler, &args, quiet);
    // What was said until then is saved even if a turn failed, or Ctrl-C or a signal ends the chat.
    let mut saved = Ok(());
    if let (Some(origin), Some(path)) = (origin, &args.saved.save_session) {
        if chat.current().messages.is_empty() {
            output::note(&format!("nothing was said, so {} was not written", path.display()));
        } else {
            saved = args.saved.save(|path| chat.save(&origin, path));
        }
    }
    match talked {
        // A reader of stdout that has seen enough is no failure, so what is told is why nothing was saved.
        Err(error) if output::is_closed_pipe(&error) => saved.and(Err(error)),
        Err(error) => Err(error),
        Ok(Ended::Quit) => saved,
        Ok(Ended::Interrupted) => saved.map(|()| std::process::exit(130)),
    }
}

enum Ended {
    Quit,
    /// By Ctrl-C or a signal, while nothing was computed.
    Interrupted,
}

/// Turns and commands until the end of the input.
fn talk(
    chat: &mut Chat,
    input: &mut Input,
    sampler: &mut Sampler,
    args: &Args,
    quiet: bool,
) -> anyhow::Result<Ended> {
    let interactive = input.is_terminal();
    loop {
        let message = match input.next(&format!("{}> ", chat.current().name))? {
            Entry::Text(message) if message.trim().is_empty() => continue,
            Entry::Text(message) => message,
            Entry::Nothing => continue,
            Entry::End => return Ok(Ended::Quit),
            Entry::Interrupted => return Ok(Ended::Interrupted),
        };
        let message = message.as_str();
        match message.split_once(' ').map_or((message, ""), |(command, rest)| (command, rest.trim())) {
            ("/quit" | "/exit", _) => return Ok(Ended::Quit),
            (command, rest) if command.starts_with('/') && !command.starts_with("//") => {
                match execute(chat, command, rest, input.edits()) {
                    Ok(answer) => output::note(&answer),
                    // In a pipe a failed command would go unnoticed, and the following input would go to the wrong
                    // branch.
                    Err(error) if !interactive => return Err(error),
                    Err(error) => output::note(&format!("kvist: {}", output::sentence(&error))),
                }
            }
            _ => {
                let message =
                    message.strip_prefix('/').filter(|rest| rest.starts_with('/')).unwrap_or(message);
                match run_turn(chat, message, sampler, args, quiet) {
                    Ok(()) => {}
                    // At a terminal, a turn that does not fit does not end the conversation.
                    Err(Failure::Turn(error)) if interactive => {
                        output::note(&format!("kvist: {}", output::sentence(&error)));
                    }
                    Err(Failure::Turn(error) | Failure::Output(error)) => return Err(error),
                }
                // At a terminal the conversation continues; a script would continue from half an answer.
                if interrupt::interrupted() && !interactive {
                    anyhow::bail!("interrupted");
                }
                interrupt::reset();
            }
        }
    }
}

/// Why a turn failed.
enum Failure {
    /// The model or its cache refused it.
    Turn(anyhow::Error),
    /// It cannot be shown.
    Output(anyhow::Error),
}

/// Sends a message to the model, and shows the answer while it is generated.
fn run_turn(
    chat: &mut Chat,
    message: &str,
    sampler: &mut Sampler,
    args: &Args,
    quiet: bool,
) -> Result<(), Failure> {
    let limits = Limits {
        max_tokens: args.max_tokens as usize,
        stop: args.stop.clone(),
        ignore_eos: false,
        no_cache: false,
    };
    let wrap = terminal_width().map(Wrap::new);
    let mut watch = Watch { stream: !args.json, wrap, thinks: false, began: false, failed: None };
    let turn = chat.send(message, sampler, &limits, &mut watch);
    let counts = chat.speculator().map(Speculator::take_counts);
    watch.end();
    if let Some(failed) = watch.failed {
        return Err(Failure::Output(failed));
    }
    match turn {
        Ok(turn) => report_turn(chat, message, &turn, counts, args, quiet).map_err(Failure::Output),
        Err(error) => Err(Failure::Turn(explained(error, chat, args.max_tokens))),
    }
}

fn report_turn(
    chat: &Chat,
    message: &str,
    turn: &Turn,
    counts: Option<Counts>,
    args: &Args,
    quiet: bool,
) -> anyhow::Result<()> {
    let g = &turn.generation;
    if args.json {
        let report = TurnReport {
            version: json::VERSION,
            branch: &chat.current().name,
            user: message,
            text: &g.text,
            reasoning: &turn.reasoning,
            finish: g.finish.name(),
            reused_tokens: turn.reused_tokens,
            prompt_tokens: g.prompt_tokens,
            tokens: g.tokens.len(),
            decode_tokens_per_second: g.decode_rate(),
            speculation: counts,
            removed_tokens: removed(chat),
            kv_bytes: chat.session().kv_bytes(),
        };
        return output::show_json_line(&report);
    }
    output::show("\n")?;
    if !quiet {
        output::note(&format!(
            "[{} reused, {} read, {} written at {:.1} tokens/s, KV {}{}]",
            turn.reused_tokens,
            g.prompt_tokens,
            g.tokens.len(),
            g.decode_rate(),
            Bytes(chat.session().kv_bytes()),
            removed(chat).map_or(String::new(), |n| format!(", {n} tokens removed so far"))
        ));
        if let Some(counts) = &counts {
            output::note(&json::speculation_summary(counts));
        }
        if g.finish == GenerationEnd::CacheFull {
            let (used, capacity) = in_use(chat);
            output::note(&format!(
                "the cache is full ({used} of {capacity} tokens), and the answer ends here: {}",
                ways_out(chat, capacity, args.max_tokens)
            ));
        }
    }
    Ok(())
}

/// Tokens that `--keep` has removed from the cache.
fn removed(chat: &Chat) -> Option<u64> {
    chat.session().config().keep.map(|_| chat.session().removed_tokens())
}

/// The number of tokens in the cache, and its capacity.
fn in_use(chat: &Chat) -> (u32, u32) {
    let groups = chat.session().report();
    let fullest = groups.iter().max_by_key(|group| group.used_cells);
    fullest.map_or((0, 0), |group| (group.used_cells, group.capacity_cells))
}

/// The error of a turn. If the cache was full, it says how full and how to free space.
fn explained(error: Error, chat: &Chat, max_tokens: u32) -> anyhow::Error {
    match error {
        Error::PromptTooLong { tokens, context } => {
            let tokens = u32::try_from(tokens).unwrap_or(u32::MAX);
            anyhow::anyhow!(
                "the conversation with this turn has {tokens} tokens, and the cache holds {context}; the turn is \
                 not accepted: {}",
                ways_out(chat, tokens, max_tokens)
            )
        }
        Error::Step(StepError::Refused(Refused::NoSpace { .. })) => {
            let (used, capacity) = in_use(chat);
            anyhow::anyhow!(
                "the cache holds {capacity} tokens, of which {used} are in use, and this turn needs more than the \
                 rest; it is not accepted: {}",
                ways_out(chat, capacity, max_tokens)
            )
        }
        error => error.into(),
    }
}

/// Suggestions that make space for a conversation of `tokens` tokens.
fn ways_out(chat: &Chat, tokens: u32, max_tokens: u32) -> String {
    let mut ways = vec!["send a shorter message".to_string()];
    if !chat.current().messages.is_empty() {
        ways = vec!["/undo removes the last question and its answer".into()];
    }
    let current = &chat.current().name;
    let others: Vec<&str> =
        chat.branches().iter().map(|branch| branch.name.as_str()).filter(|name| name != current).collect();
    if !others.is_empty() {
        ways.push(format!("/switch continues in another branch, /drop deletes one ({})", others.join(", ")));
    } else if chat.session().config().kind_traits().many_sequences {
        ways.push("next time, /fork before a digression, so that you can return".into());
    }
    let enough = tokens.saturating_add(max_tokens).checked_next_power_of_two().unwrap_or(u32::MAX);
    let trained = chat.session().model().config().context;
    let beyond =
        if enough > trained { format!(" (the model was trained on {trained})") } else { String::new() };
    ways.push(format!("start again with --context {enough}{beyond}"));
    ways.push("or with --kind ring --window TOKENS, which never fills".into());
    ways.join("; ")
}

/// Columns of the terminal on stdout; `None` elsewhere.
fn terminal_width() -> Option<usize> {
    if !std::io::stdout().is_terminal() {
        return None;
    }
    console::Term::stdout().size_checked().map(|(_, columns)| usize::from(columns)).filter(|n| *n > 0)
}

/// Executes a command; returns the message to show.
fn execute(chat: &mut Chat, command: &str, rest: &str, edits: bool) -> anyhow::Result<String> {
    let name = (!rest.is_empty()).then_some(rest);
    Ok(match command {
        "/help" => format!("{HELP}{}", if edits { HELP_WITH_LINES } else { "" }),
        "/fork" => {
            let before = chat.session().counters().bytes_moved;
            let branch = chat.fork(name)?.name.clone();
            format!("on {branch}; {} copied", Bytes(chat.session().counters().bytes_moved - before))
        }
        "/branches" => {
            let current = chat.current().name.clone();
            let line = |b: &kvist_engine::chat::Branch| {
                let mark = if b.name == current { '*' } else { ' ' };
                format!("{mark} {} ({} messages)", b.name, b.messages.len())
            };
            chat.branches().iter().map(line).collect::<Vec<_>>().join("\n")
        }
        "/switch" => {
            chat.switch(rest)?;
            format!("on {rest}")
        }
        "/drop" => {
            chat.drop_branch(rest)?;
            format!("deleted {rest}")
        }
        "/cache" => {
            let groups = chat.session().report();
            let one = groups.len() == 1;
            let text = |(g, report): (usize, &kvist_cache::Report)| {
                let head = if one { String::new() } else { format!("layer group {g}\n") };
                head + report.to_string().trim_end()
            };
            groups.iter().enumerate().map(text).collect::<Vec<_>>().join("\n")
        }
        "/undo" if chat.undo() => "undone".into(),
        "/undo" => "there is nothing to undo".into(),
        "/system" => {
            chat.set_system(name.map(str::to_string))?;
            "applies from the next turn on".into()
        }
        "/save-transcript" => {
            let path = name.context("name a file: /save-transcript FILE")?;
            output::write_file(Path::new(path), chat.transcript().as_bytes())?;
            format!("wrote {path}")
        }
        other => anyhow::bail!("there is no {other}; /help lists the commands"),
    })
}

struct Watch {
    stream: bool,
    /// `Some` at a terminal.
    wrap: Option<Wrap>,
    /// The last text shown was reasoning.
    thinks: bool,
    /// Some text was shown.
    began: bool,
    failed: Option<anyhow::Error>,
}

impl Watch {
    fn show(&mut self, text: &str) {
        if !self.stream {
            return;
        }
        let shown = if self.thinks { output::show_dimmed(text) } else { output::show(text) };
        if let Err(error) = shown {
            self.failed = Some(error);
        }
    }

    /// Ends the answer: shows the text that is still buffered.
    fn end(&mut self) {
        if let Some(rest) = self.wrap.as_mut().map(Wrap::end) {
            self.show(&rest);
        }
    }

    /// Switches between reasoning and answer.
    fn switch(&mut self, thinks: bool) {
        if self.thinks == thinks {
            return;
        }
        self.end();
        self.thinks = thinks;
        if let Some(wrap) = self.wrap.as_mut().filter(|_| self.began) {
            let space = wrap.push("\n\n");
            self.show(&space);
        }
    }
}

impl Observer for Watch {
    fn prefilled(&mut self, _: usize) -> bool {
        !interrupt::interrupted()
    }
    fn sampled(&mut self) -> bool {
        !interrupt::interrupted()
    }
    /// Shown only at a terminal: a program that reads stdout gets the answer alone.
    fn reasoning(&mut self, text: &str) -> bool {
        if self.wrap.is_some() {
            self.switch(true);
            self.began = true;
            let text = output::harmless(text);
            let text = self.wrap.as_mut().map(|wrap| wrap.push(&text)).unwrap_or_default();
            self.show(&text);
        }
        self.failed.is_none()
    }
    fn text(&mut self, text: &str) -> bool {
        self.switch(false);
        self.began = true;
        // Mark control characters before wrapping, because the marks take columns.
        let text = output::harmless(text);
        match &mut self.wrap {
            Some(wrap) => {
                let text = wrap.push(&text);
                self.show(&text);
            }
            None => self.show(&text),
        }
        self.failed.is_none()
    }
}
