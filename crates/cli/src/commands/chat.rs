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
    #[arg(long, value_name = "TEXT", value_parser = parse_stop)]
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
/drop NAME              give one up, and the cells that only it holds
/cache                  what the cache holds, sequence by sequence
/undo                   unsay the last question and its answer
/system TEXT            what the model is told first
/save-transcript FILE   write this branch to a file
/help                   this
/quit                   or end of input
//TEXT                  say /TEXT";

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
    args.cache.kind.get_or_insert_with(|| "cells".into());
    let mut sampler = args.sampling.sampler(args.sampling.seed())?;
    let opened = args.model.open()?;
    opened.tokenizer().context("this model has no tokenizer (tokenizer.json beside it)")?.check()?;
    if args.system.is_some() && opened.chat_template().is_none() {
        return Err(wrong_usage(
            "--system needs a model with a chat template; this one continues plain text",
        ));
    }
    let context = args.cache.context.unwrap_or(opened.config().context);
    args.cache.context = Some(context);
    let config = args.cache.config(opened.config(), u64::from(context))?;
    let (model, _) = args.model.load_for(opened, &config, 0, quiet)?;
    interrupt::listen();
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
        let read = interrupt::idle(|| std::io::stdin().lock().read_until(b'\n', &mut line));
        if read.context("cannot read stdin")? == 0 {
            return Ok(());
        }
        let said = match utf8(std::mem::take(&mut line), "stdin") {
            Ok(said) => said,
            Err(error) if interactive => {
                output::note(&format!("kvist: {}", output::sentence(&error)));
                continue;
            }
            Err(error) => return Err(error),
        };
        let said = said.trim_end_matches(['\n', '\r']);
        if said.trim().is_empty() {
            continue;
        }
        match said.split_once(' ').map_or((said, ""), |(command, rest)| (command, rest.trim())) {
            ("/quit" | "/exit", _) => return Ok(()),
            (command, rest) if command.starts_with('/') && !command.starts_with("//") => {
                match obey(&mut chat, command, rest) {
                    Ok(answer) => output::note(&answer),
                    // In a pipe nobody sees that a command failed, and what follows would be said in a wrong place.
                    Err(error) if !interactive => return Err(error),
                    Err(error) => output::note(&format!("kvist: {}", output::sentence(&error))),
                }
            }
            _ => {
                let said = said.strip_prefix('/').filter(|rest| rest.starts_with('/')).unwrap_or(said);
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
                // At a terminal the conversation goes on; a script would go on from half an answer.
                if interrupt::interrupted() && !interactive {
                    anyhow::bail!("interrupted");
                }
                interrupt::reset();
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
            output::note(
                "the cache is full: /undo, /drop branches, start with a larger --context, or with --kind ring --window TOKENS, which never fills",
            );
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
        "/drop" => {
            chat.drop_branch(rest)?;
            format!("{rest} is gone")
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
