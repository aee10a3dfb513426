//! `kvist chat`: turns, branches, undo.
use crate::options::*;
use crate::{interrupt, json, output};
use anyhow::Context;
use kvist_engine::chat::{Chat, Turn};
use kvist_engine::generate::{Finish, Limits, Observer};
use kvist_engine::session::ModelSession;
use serde::Serialize;
use std::io::{BufRead, IsTerminal};
use std::path::Path;

#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    cache: CacheArgs,
    #[command(flatten)]
    sampling: SamplingArgs,
    /// Tokens of an answer at most
    #[arg(short = 'n', long, default_value_t = 512, value_name = "TOKENS")]
    max_tokens: u32,
    /// End an answer where this text comes; may be given several times
    #[arg(long, value_name = "TEXT")]
    stop: Vec<String>,
    /// What the model is told first
    #[arg(long, value_name = "TEXT")]
    system: Option<String>,
    /// One JSON document per turn, a line each
    #[arg(long)]
    json: bool,
}

const HELP: &str = "\
/fork [NAME]            go on in a new branch; nothing is copied
/branches               list them
/switch NAME            go on in another one
/undo                   unsay the last question and its answer
/system TEXT            what the model is told first
/save-transcript FILE   write this branch to a file
/help                   this
/quit                   or end of input";

/// `kvist chat --json`, one line per turn
#[derive(Serialize)]
struct TurnReport<'a> {
    version: u32,
    branch: &'a str,
    user: &'a str,
    text: &'a str,
    finish: &'static str,
    reused_tokens: usize,
    prompt_tokens: usize,
    tokens: usize,
    decode_tokens_per_second: f64,
    kv_bytes: u64,
}

pub fn run(mut args: Args, quiet: bool) -> anyhow::Result<()> {
    // Branches need a kind that shares; who names another one gets that.
    if args.cache.kind == "contiguous" && args.cache.window.is_none() {
        args.cache.kind = "cells".into();
    }
    let mut sampler = args.sampling.sampler(args.sampling.seed())?;
    interrupt::listen();
    let model = args.model.load(quiet)?;
    anyhow::ensure!(model.tokenizer().is_some(), "this model has no tokenizer (tokenizer.json beside it)");
    let context = args.cache.context.unwrap_or(model.decoder().config().context);
    args.cache.context = Some(context);
    let config = args.cache.config(model.decoder().config(), u64::from(context))?;
    let mut chat = Chat::new(ModelSession::new(&model, &registry(model.decoder().compute()), &config)?, None);
    if args.system.is_some() {
        chat.set_system(args.system.clone()).map_err(|e| wrong_usage(e.to_string()))?;
    }
    let interactive = std::io::stdin().is_terminal();
    if !quiet {
        output::note(&format!("{}; /help lists the commands", model.name()));
        if !chat.has_template() {
            output::note("it has no chat template: what you type is continued as plain text");
        }
    }
    let limits = Limits {
        max_tokens: args.max_tokens as usize,
        stop: args.stop.clone(),
        ignore_eos: false,
        no_cache: false,
    };
    let mut line = Vec::new();
    loop {
        if interactive {
            output::ask(&format!("\n{}> ", chat.current().name));
        }
        line.clear();
        let read = std::io::stdin().lock().read_until(b'\n', &mut line).context("cannot read stdin")?;
        if read == 0 || (interrupt::interrupted() && line.is_empty()) {
            return Ok(());
        }
        interrupt::reset();
        let said = utf8(std::mem::take(&mut line), "stdin")?;
        let said = said.trim_end_matches(['\n', '\r']);
        if said.trim().is_empty() {
            continue;
        }
        match said.split_once(' ').map_or((said, ""), |(command, rest)| (command, rest.trim())) {
            ("/quit" | "/exit", _) => return Ok(()),
            (command, rest) if command.starts_with('/') => match obey(&mut chat, command, rest) {
                Ok(answer) => output::note(&answer),
                Err(error) => output::note(&format!("kvist: {}", output::sentence(&error))),
            },
            _ => {
                let mut watch = Watch { stream: !args.json, failed: None };
                let turn = chat.say(said, &mut sampler, &limits, &mut watch);
                if let Some(failed) = watch.failed {
                    return Err(failed);
                }
                match turn {
                    Ok(turn) => tell(&chat, said, &turn, args.json, quiet)?,
                    // One that does not fit is no end of the conversation.
                    Err(error) if interactive => {
                        output::note(&format!("kvist: {}", output::sentence(&error.into())))
                    }
                    Err(error) => return Err(error.into()),
                }
            }
        }
    }
}

fn tell(chat: &Chat, said: &str, turn: &Turn, json: bool, quiet: bool) -> anyhow::Result<()> {
    let g = &turn.generation;
    if json {
        let report = TurnReport {
            version: json::VERSION,
            branch: &chat.current().name,
            user: said,
            text: &g.text,
            finish: g.finish.name(),
            reused_tokens: turn.reused_tokens,
            prompt_tokens: g.prompt_tokens,
            tokens: g.tokens.len(),
            decode_tokens_per_second: g.decode_rate(),
            kv_bytes: chat.session().kv_bytes(),
        };
        return output::show(&(serde_json::to_string(&report)? + "\n"));
    }
    output::show("\n")?;
    if !quiet {
        output::note(&format!(
            "[{} reused, {} read, {} written at {:.1} tokens/s, KV {}]",
            turn.reused_tokens,
            g.prompt_tokens,
            g.tokens.len(),
            g.decode_rate(),
            bytes(chat.session().kv_bytes())
        ));
        if g.finish == Finish::CacheFull {
            output::note("the cache is full: /undo, start with a larger --context, or with --window");
        }
    }
    Ok(())
}

/// Carry out a command; the answer is for people.
fn obey(chat: &mut Chat, command: &str, rest: &str) -> anyhow::Result<String> {
    let name = (!rest.is_empty()).then_some(rest);
    Ok(match command {
        "/help" => HELP.into(),
        "/fork" => {
            let before = chat.session().counters().bytes_moved;
            let branch = chat.fork(name)?.name.clone();
            format!("on {branch}; {} copied", bytes(chat.session().counters().bytes_moved - before))
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
        "/undo" if chat.undo() => "unsaid".into(),
        "/undo" => "nothing was said here yet".into(),
        "/system" => {
            chat.set_system(name.map(str::to_string))?;
            "from the next turn on".into()
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
    failed: Option<anyhow::Error>,
}

impl Observer for Watch {
    fn prefilled(&mut self, _: usize) -> bool {
        !interrupt::interrupted()
    }
    fn sampled(&mut self) -> bool {
        !interrupt::interrupted()
    }
    fn text(&mut self, text: &str) -> bool {
        if self.stream
            && let Err(error) = output::show(text)
        {
            self.failed = Some(error);
        }
        self.failed.is_none()
    }
}
