//! `kvist chat`: turns, branches, undo.
mod advice;
mod commands;
mod input;
mod screen;
mod wrap;

use crate::options::*;
use crate::{interrupt, json, output};
use anyhow::Context;
use input::{Entry, Input};
use kvist_engine::chat::{Chat, Turn};
use kvist_engine::generate::{GenerationEnd, Limits};
use kvist_engine::memory::RECENT_SEQUENCES;
use kvist_engine::sampler::Sampler;
use kvist_engine::session::ModelSession;
use kvist_engine::speculate::{Counts, Speculator};
use screen::Screen;
use serde::Serialize;

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
                match commands::execute(chat, command, rest, input.edits()) {
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
    let mut screen = Screen::new(!args.json);
    let turn = chat.send(message, sampler, &limits, &mut screen);
    let counts = chat.speculator().map(Speculator::take_counts);
    screen.end().map_err(Failure::Output)?;
    match turn {
        Ok(turn) => report_turn(chat, message, &turn, counts, args, quiet).map_err(Failure::Output),
        Err(error) => Err(Failure::Turn(advice::explained(error, chat, args.max_tokens))),
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
            let (used, capacity) = advice::in_use(chat);
            output::note(&format!(
                "the cache is full ({used} of {capacity} tokens), and the answer ends here: {}",
                advice::ways_out(chat, capacity, args.max_tokens)
            ));
        }
    }
    Ok(())
}

/// Tokens that `--keep` has removed from the cache.
fn removed(chat: &Chat) -> Option<u64> {
    chat.session().config().keep.map(|_| chat.session().removed_tokens())
}
