//! `kvist run`: one prompt, one answer.
use crate::options::*;
use crate::{interrupt, json, output, progress};
use anyhow::Context;
use clap::ValueHint;
use indicatif::ProgressBar;
use kvist_cache::SeqId;
use kvist_engine::answer::generate_answer;
use kvist_engine::frozen::{FrozenPrefix, begin_with};
use kvist_engine::generate::{GenerateArgs, Generation, Limits, Observer, Speculation, generate};
use kvist_engine::saved::{self, Origin, SavedMessage, SavedSession, SavedText};
use kvist_engine::session::ModelSession;
use kvist_model::Opened;
use kvist_model::template::Message;
use std::io::{IsTerminal, Read};
use std::path::{Path, PathBuf};

#[derive(clap::Args)]
pub struct Args {
    /// What to continue or answer, quoted or in several words; `-`, or nothing where stdin is a pipe, reads stdin
    prompt: Vec<String>,
    /// Read the prompt from a file
    #[arg(short, long, conflicts_with = "prompt", value_hint = ValueHint::FilePath)]
    file: Option<PathBuf>,
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
    /// Maximum tokens to generate
    #[arg(short = 'n', long, default_value_t = 256, value_name = "TOKENS")]
    max_tokens: u32,
    /// End the output where this text appears; may be given several times
    #[arg(long, value_name = "TEXT", value_parser = parse_stop)]
    stop: Vec<String>,
    /// Continue after the model's end token
    #[arg(long)]
    ignore_eos: bool,
    /// Continue the prompt as plain text, even if the model has a chat template
    #[arg(long)]
    raw: bool,
    /// A system message, for models with a chat template
    #[arg(long, value_name = "TEXT", conflicts_with = "raw")]
    system: Option<String>,
    /// Print only the generated text, without the prompt
    #[arg(long)]
    no_echo: bool,
    /// Recompute the whole text for every token instead of reading the cache
    #[arg(long, conflicts_with_all = ["save_session", "resume", "prefix", "keep"])]
    no_cache: bool,
    /// Print one JSON document instead of text
    #[arg(long)]
    json: bool,
}

const NO_TOKENIZER: &str =
    "this model has no tokenizer (no tokenizer.json next to it); `kvist logits` works without one";

pub fn run(args: Args, quiet: bool) -> anyhow::Result<()> {
    let saved = args.saved.open()?;
    let prompt = args.prompt()?;
    let seed = args.sampling.seed();
    let opened = args.model.open(quiet)?;
    let mut sampler = args.sampling.sampler(&opened, seed)?;
    let of_the_model = args.sampling.of_the_model(&opened);
    let fingerprint = args.saved.fingerprint(saved.as_ref(), &opened)?;
    let Text { tokens, messages, echo } = match &saved {
        None => args.encode(&opened, &prompt)?,
        Some(Beginning::Session(saved)) => args.encode_after(&opened, saved, &prompt)?,
        Some(Beginning::Prefix(prefix)) => args.encode_after_prefix(&opened, prefix, &prompt)?,
    };
    let answers = !messages.is_empty();
    args.speculation.check_no_cache(args.no_cache)?;
    // What is saved is what another token would see.
    let saves = u64::from(args.saved.save_session.is_some());
    let needed = tokens.len() as u64 + u64::from(args.max_tokens) + args.speculation.room() + saves;
    let mut config = args.cache.config(opened.config(), needed)?;
    args.keep.prepare(&mut config, args.cache.kind.as_deref())?;
    args.speculation.prepare(&mut config, args.cache.kind.as_deref(), args.cache.context)?;
    kvist_engine::check_prompt(&config, tokens.len())?;
    let what = (opened.config(), args.model.weights);
    let origin = args.saved.origin(fingerprint, saved.as_ref(), what, &config)?;
    let draft = args.speculation.open_draft(&opened, &args.model, quiet)?;
    let (model, plan, draft) =
        args.speculation.load(&args.model, opened, draft, &config, tokens.len(), quiet)?;
    let mut speculator = args.speculation.speculator(draft.as_ref(), &model, &config, 1)?;
    interrupt::listen();
    let tokenizer = model.tokenizer().context(NO_TOKENIZER)?;
    let mut session = ModelSession::new(&model, &registry(&args.model.compute.get()?), &config)?;

    let mut resumed = 0;
    if let Some((saved, origin)) = saved.as_ref().zip(origin.as_ref()) {
        let same = saved.tokens().iter().zip(&tokens).take_while(|(a, b)| a == b).count();
        let most = same.min(tokens.len() - 1);
        resumed = match saved {
            Beginning::Session(saved) => saved::resume(&mut session, SeqId::ONLY, saved, origin, most)?,
            Beginning::Prefix(prefix) => begin_with(&mut session, SeqId::ONLY, prefix, origin, most)?,
        };
        args.saved.note(quiet, resumed, saved);
        sampler.observe(&tokens[..resumed]);
    }

    let limits = Limits {
        max_tokens: args.max_tokens as usize,
        stop: args.stop.clone(),
        ignore_eos: args.ignore_eos,
        no_cache: args.no_cache,
    };
    drop(saved);
    let bar = progress::bar("reading", (tokens.len() - resumed) as u64, quiet || tokens.len() < 512);
    let echo = echo.filter(|_| !args.json).map(str::to_string);
    let thinks = std::io::stdout().is_terminal().then_some(false);
    let mut watch = Watch { bar, echo, stream: !args.json, thinks, failed: None };
    let what = GenerateArgs {
        session: &mut session,
        seq: SeqId::ONLY,
        before: &tokens[..resumed],
        prompt: &tokens[resumed..],
        tokenizer: Some(tokenizer),
        sampler: &mut sampler,
        limits: &limits,
        speculation: speculator.as_mut().map(|speculator| Speculation { speculator }),
    };
    let (generation, reasoning) = match answers {
        true => generate_answer(what, &mut watch)?,
        false => (generate(what, &mut watch)?, String::new()),
    };
    watch.text(""); // print the echoed prompt even if the answer has no text
    // Saved also if stdout was closed: that ends the text, and is no failure.
    if let Some(origin) = &origin {
        args.saved.save(|path| save_session(&mut session, &tokens, &messages, &generation, origin, path))?;
    }
    if let Some(failed) = watch.failed {
        return Err(failed);
    }
    let counts = speculator.map(|speculator| speculator.counts().clone());
    let mut report = json::Run::new(&model, &session, &plan, &prompt, (&generation, reasoning), seed, counts);
    report.resumed_tokens = args.saved.continues().then_some(resumed);
    if args.json {
        return output::show_json(&report);
    }
    output::show("\n")?;
    if !quiet {
        output::note(&report.summary());
        of_the_model.iter().for_each(|line| output::note(line));
    }
    Ok(())
}

/// Saves the text that the session has now.
fn save_session(
    session: &mut ModelSession,
    prompt: &[u32],
    messages: &[Message],
    generation: &Generation,
    origin: &Origin,
    path: &Path,
) -> Result<(), kvist_model::Error> {
    let tokens = [prompt, &generation.tokens].concat();
    // A question whose answer has not begun stays a question.
    let answers = !messages.is_empty() && !generation.tokens.is_empty();
    let answer = answers.then(|| Message::new("assistant", &generation.text));
    let messages: Vec<SavedMessage> = messages.iter().chain(&answer).map(SavedMessage::from).collect();
    let text = SavedText { tokens: &tokens, messages: &messages };
    saved::save(session, SeqId::ONLY, text, origin, path)
}

/// What is to be answered or continued.
struct Text<'p> {
    tokens: Vec<u32>,
    /// The conversation that the tokens are; empty for plain text.
    messages: Vec<Message>,
    /// Text to print in front of the answer.
    echo: Option<&'p str>,
}

impl Args {
    fn prompt(&self) -> anyhow::Result<String> {
        let prompt = match (self.prompt.as_slice(), &self.file) {
            (_, Some(path)) => read_text(path)?,
            ([], None) if self.saved.continues() && std::io::stdin().is_terminal() => String::new(),
            ([], None) if std::io::stdin().is_terminal() => {
                return Err(wrong_usage("no prompt: give one, or --file, or pipe it in"));
            }
            (words, None) if !words.is_empty() && words != ["-"] => words.join(" "),
            _ => {
                let mut bytes = Vec::new();
                std::io::stdin().read_to_end(&mut bytes).context("cannot read stdin")?;
                utf8(bytes, "stdin")?
            }
        };
        if prompt.is_empty() && !self.saved.continues() {
            return Err(wrong_usage("the prompt is empty"));
        }
        Ok(prompt)
    }

    /// The prompt's tokens, and the text that the answer continues (`None` if it answers a chat).
    fn encode<'p>(&self, model: &Opened, prompt: &'p str) -> anyhow::Result<Text<'p>> {
        let tokenizer = model.tokenizer().context(NO_TOKENIZER)?;
        match model.chat_template() {
            Some(template) if !self.raw => {
                let mut messages = Vec::new();
                if let Some(system) = &self.system {
                    messages.push(Message::new("system", system));
                }
                messages.push(Message::new("user", prompt));
                let text = template.render(&messages, tokenizer, true)?;
                Ok(Text { tokens: tokenizer.encode(&text, false)?, messages, echo: None })
            }
            None if self.system.is_some() => {
                Err(wrong_usage("--system needs a model with a chat template; this one continues plain text"))
            }
            _ => Ok(Text {
                tokens: tokenizer.encode(prompt, true)?,
                messages: Vec::new(),
                echo: (!self.no_echo).then_some(prompt),
            }),
        }
    }

    /// As [`encode`](Self::encode), after a saved session; without a prompt its text goes on.
    fn encode_after<'p>(
        &self,
        model: &Opened,
        saved: &SavedSession,
        prompt: &'p str,
    ) -> anyhow::Result<Text<'p>> {
        let tokenizer = model.tokenizer().context(NO_TOKENIZER)?;
        if self.system.is_some() {
            return Err(wrong_usage("--system: the resumed text has begun already"));
        }
        let echo = (!self.no_echo && !prompt.is_empty()).then_some(prompt);
        if saved.messages().is_empty() {
            let mut tokens = saved.tokens().to_vec();
            tokens.extend(tokenizer.encode(prompt, false)?);
            return Ok(Text { tokens, messages: Vec::new(), echo });
        }
        let template = model.chat_template().filter(|_| !self.raw);
        let template = template.ok_or_else(|| {
            wrong_usage("the session is a conversation: resume it without --raw, with a model that has a chat template")
        })?;
        let mut messages: Vec<Message> = saved.messages().iter().map(Message::from).collect();
        let answered = messages.last().is_some_and(|message| message.role != "user");
        match (prompt.is_empty(), answered) {
            (true, true) => {
                return Err(wrong_usage(
                    "the session is a conversation, and its last question is answered: give a prompt",
                ));
            }
            (true, false) => {}
            (false, _) => messages.push(Message::new("user", prompt)),
        }
        let text = template.render(&messages, tokenizer, true)?;
        Ok(Text { tokens: tokenizer.encode(&text, false)?, messages, echo: None })
    }

    /// As [`encode`](Self::encode), after a frozen prefix: plain text goes on, a system message gets a question.
    fn encode_after_prefix<'p>(
        &self,
        model: &Opened,
        prefix: &FrozenPrefix,
        prompt: &'p str,
    ) -> anyhow::Result<Text<'p>> {
        let tokenizer = model.tokenizer().context(NO_TOKENIZER)?;
        if self.system.is_some() {
            return Err(wrong_usage("--system: the prefix has the system message"));
        }
        let template = model.chat_template().filter(|_| !self.raw);
        match (prefix.system(), template) {
            (None, None) => {
                let echo = (!self.no_echo && !prompt.is_empty()).then_some(prompt);
                let tokens = [prefix.tokens(), &tokenizer.encode(prompt, false)?].concat();
                Ok(Text { tokens, messages: Vec::new(), echo })
            }
            (Some(_), None) => Err(wrong_usage(
                "the prefix is a system message: use it without --raw, with a model that has a chat template",
            )),
            (None, Some(_)) => Err(wrong_usage("the prefix is plain text: continue it with --raw")),
            (Some(_), Some(_)) if prompt.is_empty() => {
                Err(wrong_usage("the prefix is a system message: give a prompt"))
            }
            (Some(system), Some(template)) => {
                let messages = vec![Message::new("system", system), Message::new("user", prompt)];
                let text = template.render(&messages, tokenizer, true)?;
                Ok(Text { tokens: tokenizer.encode(&text, false)?, messages, echo: None })
            }
        }
    }
}

/// Streams the answer to stdout; stops at Ctrl-C.
struct Watch {
    bar: ProgressBar,
    /// The prompt, printed together with the first text of the answer: a failure before that leaves stdout empty.
    echo: Option<String>,
    stream: bool,
    /// At a terminal: whether the last text shown was reasoning. `None` elsewhere.
    thinks: Option<bool>,
    failed: Option<anyhow::Error>,
}

impl Watch {
    fn show(&mut self, text: &str, thinks: bool) -> bool {
        let shown = match (self.stream, thinks) {
            (false, _) => Ok(()),
            (true, true) => output::show_dimmed(text),
            (true, false) => output::show(text),
        };
        self.failed = self.failed.take().or(shown.err());
        self.failed.is_none()
    }
}

impl Observer for Watch {
    fn prefilled(&mut self, tokens: usize) -> bool {
        self.bar.set_position(tokens as u64);
        !interrupt::interrupted()
    }
    fn sampled(&mut self) -> bool {
        !interrupt::interrupted()
    }
    fn text(&mut self, text: &str) -> bool {
        self.bar.finish_and_clear();
        let space = if self.thinks == Some(true) { "\n\n" } else { "" };
        self.thinks = self.thinks.map(|_| false);
        let text = self.echo.take().unwrap_or_default() + space + text;
        self.show(&text, false)
    }
    /// Shown only at a terminal: a program that reads stdout gets the answer alone.
    fn reasoning(&mut self, text: &str) -> bool {
        if self.thinks.is_none() {
            return true;
        }
        self.bar.finish_and_clear();
        self.thinks = Some(true);
        self.show(text, true)
    }
}
