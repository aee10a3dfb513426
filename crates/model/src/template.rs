//! Chat templates: the Jinja templates that models ship, rendered as transformers renders them.
//!
//! A template is a program that comes with a model and gets its input from clients. A rendering always ends: its
//! instructions are counted. Its memory is limited to [`Conversation::rendering_bytes`]; beyond that it fails. Deep
//! nesting is refused. After its [`Halt`](crate::halt::Halt) is set, a rendering ends within one loop iteration, filter
//! or write; none of these walks a list that would weigh more than the limit if it were materialised.
mod conversation;
mod dates;
mod filters;
mod guarded;
mod json;
mod limits;

use crate::error::Error;
use crate::guard::quietly;
use crate::halt;
use crate::tokenizer::{Tokenizer, folder_config};
use crate::weights::Gguf;
use minijinja::machinery::{Token, tokenize};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Serde, Value};
use minijinja::{Environment, context};
use std::path::Path;
use std::sync::Arc;

pub use conversation::Conversation;

/// One message.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Message {
    /// `system`, `user` or `assistant`.
    pub role: String,
    pub content: String,
}

impl Message {
    pub fn new(role: &str, content: &str) -> Self {
        Message { role: role.into(), content: content.into() }
    }
}

/// A compiled template, and the separate template for conversations with tools if a model ships two.
pub struct ChatTemplate {
    file: String,
    source: String,
    guarded: guarded::Guarded,
    /// Variables of every rendering that sets no others.
    defaults: Arc<serde_json::Map<String, serde_json::Value>>,
    tool_use: Option<Box<ChatTemplate>>,
}

impl std::fmt::Debug for ChatTemplate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ChatTemplate").finish_non_exhaustive()
    }
}

const NAME: &str = "chat";
/// transformers' name for the template used with tools.
const TOOL_USE: &str = "tool_use";

/// Maximum source size. Models ship templates of up to some tens of KiB.
const MAX_SOURCE_BYTES: usize = 128 << 10;
/// Maximum number of tokens between `{{` and `}}`. minijinja's compiler recurses, in quadratic time, for every operator
/// of a chain (`not not not …`, `a+a+a+…`). A long chain would overflow the stack and abort the process.
const MAX_TAG_TOKENS: usize = 2_000;
/// Stack size for the compiler: enough for chains of that length, and for as many `elif` as fit into
/// [`MAX_SOURCE_BYTES`]. Only pages that are touched take memory.
const COMPILER_STACK_BYTES: usize = 256 << 20;

/// Limit on products of constants, in bytes or items. The compiler evaluates them, even `'x' * 100000000`.
const MAX_CONSTANT_BYTES: usize = 1 << 20;

/// Maximum number of instructions per rendering, checks included. A conversation of a thousand turns needs a fiftieth
/// of it; a template that counts to a billion is stopped.
const FUEL: u64 = 20_000_000;

/// The constants of one tag.
#[derive(Default)]
struct Constants {
    /// Bytes of strings, plus one byte per list item.
    bytes: usize,
    /// Upper bound on the numbers combined, whether added or multiplied.
    product: usize,
    multiplies: bool,
}

impl Constants {
    fn see(&mut self, token: &Token) {
        match token {
            Token::Str(text) => self.bytes += text.len() + 1,
            Token::String(text) => self.bytes += text.len() + 1,
            Token::BracketOpen | Token::BraceOpen | Token::Comma => self.bytes += 1,
            Token::Int(number) => self.times(usize::try_from(*number).unwrap_or(usize::MAX)),
            Token::Int128(_) | Token::Pow => self.times(usize::MAX),
            Token::Mul => self.multiplies = true,
            _ => {}
        }
    }

    fn times(&mut self, number: usize) {
        self.product = self.product.max(1).saturating_mul(number.max(2));
    }

    /// Upper bound on the size of a product of the constants.
    fn bytes(self) -> usize {
        if self.multiplies { self.bytes.saturating_mul(self.product) } else { 0 }
    }
}

impl ChatTemplate {
    /// Compiles a template. Errors call the file `file`.
    pub fn new(file: &str, source: &str) -> Result<Self, Error> {
        Self::compiled(file, source, |_| {})
    }

    /// Like [`new`](Self::new), with additions to the environment.
    fn compiled(
        file: &str,
        source: &str,
        add: impl FnOnce(&mut Environment<'static>),
    ) -> Result<Self, Error> {
        let failed = |error| failed(file, error);
        let mut environment = Environment::new();
        environment.set_debug(false); // errors are one line, also in debug builds
        environment.set_fuel(Some(FUEL));
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build().map_err(failed)?;
        environment.set_syntax(syntax.clone());
        filters::register(&mut environment);
        guarded::register(&mut environment);
        // For minijinja `none` is iterable like an empty list. Templates test whether `tools` is iterable; without
        // tools it is `none` and must not be.
        environment.add_test("iterable", |value: &Value| !value.is_none() && value.try_iter().is_ok());
        add(&mut environment);
        let text = source.to_string();
        let source = without_generation_marks(source);
        if source.len() > MAX_SOURCE_BYTES {
            let what = format!("has {} bytes; kvist allows {MAX_SOURCE_BYTES}", source.len());
            return Err(Error::Template { file: file.into(), what });
        }
        let (mut tokens, mut constants, mut all_constants) = (0, Constants::default(), 0_usize);
        for token in tokenize(&source, false, syntax) {
            let Ok((token, _)) = token else { break }; // the compiler reports it better
            tokens += 1;
            constants.see(&token);
            match token {
                Token::VariableStart | Token::BlockStart => tokens = 0,
                Token::VariableEnd | Token::BlockEnd => {
                    all_constants = all_constants.saturating_add(std::mem::take(&mut constants).bytes());
                }
                _ if tokens > MAX_TAG_TOKENS => {
                    let what = format!("has a tag of more than {MAX_TAG_TOKENS} tokens");
                    return Err(Error::Template { file: file.into(), what });
                }
                _ => {}
            }
            if all_constants > MAX_CONSTANT_BYTES {
                let what = format!("multiplies constants to more than {MAX_CONSTANT_BYTES} bytes");
                return Err(Error::Template { file: file.into(), what });
            }
        }
        std::thread::scope(|scope| {
            let compile = || quietly(|| environment.add_template_owned(NAME, source));
            let thread = std::thread::Builder::new().stack_size(COMPILER_STACK_BYTES);
            let thread = thread.spawn_scoped(scope, compile);
            let broke = || Error::Template {
                file: file.into(),
                what: "caused a panic in the template engine".into(),
            };
            let compiled = thread.map_err(|_| broke())?.join().ok().flatten();
            compiled.ok_or_else(broke)?.map_err(failed)
        })?;
        let guarded = guarded::Guarded::new(environment, NAME).map_err(failed)?;
        Ok(ChatTemplate {
            file: file.into(),
            source: text,
            guarded,
            defaults: Arc::default(),
            tool_use: None,
        })
    }

    /// Sets the template to use with tools.
    pub fn with_tool_use(self, template: ChatTemplate) -> Self {
        ChatTemplate { tool_use: Some(Box::new(template)), ..self }
    }

    /// Sets variables for every rendering, such as `enable_thinking`. A conversation's own come before them.
    ///
    /// # Errors
    /// The template sets one of these names itself, or a value is nested too deeply. Nothing is set then.
    pub fn set_defaults(&mut self, kwargs: serde_json::Map<String, serde_json::Value>) -> Result<(), Error> {
        conversation::check_kwargs(&kwargs)?;
        self.defaults = Arc::new(kwargs);
        if let Some(template) = &mut self.tool_use {
            template.defaults = self.defaults.clone();
        }
        Ok(())
    }

    /// Reads `chat_template.jinja`, or `chat_template` in `tokenizer_config.json`; `None` if there is neither. For
    /// tools: `additional_chat_templates/tool_use.jinja`, or the template named `tool_use` if there is a list.
    pub fn from_folder(folder: &Path) -> Result<Option<Self>, Error> {
        let read = |path: &Path| {
            let text =
                std::fs::read_to_string(path).map_err(|source| Error::Read { path: path.into(), source })?;
            Self::new(&path.display().to_string(), &text)
        };
        let path = folder.join("chat_template.jinja");
        if path.exists() {
            let template = read(&path)?;
            let path = folder.join("additional_chat_templates").join(format!("{TOOL_USE}.jinja"));
            return Ok(Some(if path.exists() { template.with_tool_use(read(&path)?) } else { template }));
        }
        let config = folder_config(folder)?;
        let file = folder.join("tokenizer_config.json").display().to_string();
        match config.get("chat_template") {
            Some(serde_json::Value::String(text)) => Self::new(&file, text).map(Some),
            // Several named templates: `default` is the one for chat.
            Some(serde_json::Value::Array(list)) => {
                let named = |name: &str| list.iter().find(|e| e.get("name").is_some_and(|n| n == name));
                let text = |entry: &'_ serde_json::Value| entry.get("template")?.as_str().map(str::to_string);
                let Some(default) = named("default").or(list.first()).and_then(text) else { return Ok(None) };
                let template = Self::new(&file, &default)?;
                Ok(Some(match named(TOOL_USE).and_then(text) {
                    Some(text) => template.with_tool_use(Self::new(&file, &text)?),
                    None => template,
                }))
            }
            _ => Ok(None),
        }
    }

    /// Reads `tokenizer.chat_template`, and for tools `tokenizer.chat_template.tool_use`.
    pub fn from_gguf(gguf: &Gguf) -> Result<Option<Self>, Error> {
        let read = |key: &str| gguf.metadata.text(key)?.map(|text| Self::new(gguf.file(), text)).transpose();
        let Some(template) = read("tokenizer.chat_template")? else { return Ok(None) };
        let tool_use = read(&format!("tokenizer.chat_template.{TOOL_USE}"))?;
        Ok(Some(match tool_use {
            Some(tool_use) => template.with_tool_use(tool_use),
            None => template,
        }))
    }

    /// The source of the template used with or without tools.
    pub fn source(&self, with_tools: bool) -> &str {
        &self.chosen(with_tools).source
    }

    fn chosen(&self, with_tools: bool) -> &ChatTemplate {
        self.tool_use.as_deref().filter(|_| with_tools).unwrap_or(self)
    }

    /// Renders a conversation. With `add_generation_prompt` the text ends where the assistant's answer begins.
    pub fn render(
        &self,
        messages: &[Message],
        tokenizer: &Tokenizer,
        add_generation_prompt: bool,
    ) -> Result<String, Error> {
        let turn = |m: &Message| {
            Value::from_pairs([
                ("role", Value::from(m.role.as_str())),
                ("content", Value::from(m.content.as_str())),
            ])
        };
        let bytes = messages.iter().map(|m| m.role.len() + m.content.len()).sum();
        let messages: Vec<Value> = messages.iter().map(turn).collect();
        self.fill(context! { messages }, bytes, tokenizer, add_generation_prompt)
    }

    /// Renders a conversation as sent by a client of the OpenAI API. Errors in the messages are [`Error::Usage`] and
    /// name the place; errors raised by the template are [`Error::Template`].
    pub fn render_conversation(
        &self,
        conversation: &Conversation<'_>,
        tokenizer: &Tokenizer,
    ) -> Result<String, Error> {
        conversation::check_kwargs(conversation.kwargs)?;
        conversation.check_depth()?;
        let bytes = conversation.bytes();
        let mut messages = conversation::messages(conversation.messages)?;
        let chosen = self.chosen(!conversation.tools.is_empty());
        let fill = |messages: &[serde_json::Value]| {
            let tools = Some(conversation.tools).filter(|tools| !tools.is_empty());
            let values = context! {
                messages => Value::from(Serde(messages)),
                tools => Value::from(Serde(tools)),
                documents => (),
                ..Value::from(Serde(conversation.kwargs))
            };
            chosen.fill(values, bytes, tokenizer, conversation.add_generation_prompt)
        };
        let rendered = fill(&messages);
        // Some templates take the length of a content without checking that it exists.
        let null = |m: &&mut serde_json::Value| m.get("content").is_some_and(serde_json::Value::is_null);
        let nulls: Vec<_> = messages.iter_mut().filter(null).collect();
        if rendered.is_ok() || nulls.is_empty() {
            return rendered;
        }
        nulls.into_iter().for_each(|message| message["content"] = "".into());
        fill(&messages).or(rendered)
    }

    fn fill(
        &self,
        values: Value,
        bytes: usize,
        tokenizer: &Tokenizer,
        add_generation_prompt: bool,
    ) -> Result<String, Error> {
        halt::check()?;
        let failed = |error| failed(&self.file, error);
        let values = context! {
            add_generation_prompt => add_generation_prompt,
            bos_token => tokenizer.bos_text.as_deref().unwrap_or_default(),
            eos_token => tokenizer.eos_text.as_deref().unwrap_or_default(),
            ..context! { ..values, ..Value::from(Serde(&*self.defaults)) }
        };
        let bytes = bytes + conversation::weight_of(&self.defaults);
        // minijinja 3.0.5 panics when an empty list or string is reversed, `[][::-1]`. Rendering only reads its input,
        // so a caught panic leaves no inconsistent state.
        let rendered = limits::within(limits::bytes_for(bytes), || quietly(|| self.guarded.render(values)));
        halt::check()?;
        let broke = || Error::Template {
            file: self.file.clone(),
            what: "caused a panic in the template engine".into(),
        };
        rendered.ok_or_else(broke)?.map_err(failed)
    }
}

fn failed(file: &str, error: minijinja::Error) -> Error {
    Error::Template { file: file.into(), what: error.to_string() }
}

/// transformers adds the block `{% generation %}` to Jinja. It marks the assistant's text for training and renders its
/// content; SmolLM3's template uses it. Replaced by a block whose condition is always true.
fn without_generation_marks(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some((before, tag)) = rest.split_once("{%") {
        out += before;
        out += "{%";
        rest = tag;
        let word = tag.trim_start_matches(['-', '+']).trim_start();
        for (mark, block) in [("generation", "if true"), ("endgeneration", "endif")] {
            let after = word.strip_prefix(mark);
            let Some(after) =
                after.filter(|s| s.trim_start().trim_start_matches(['-', '+']).starts_with("%}"))
            else {
                continue;
            };
            out += &tag[..tag.len() - word.len()];
            out += block;
            rest = after;
        }
    }
    out + rest
}

#[cfg(test)]
mod tests {
    use super::{ChatTemplate, Conversation};
    use crate::error::Error;
    use crate::halt::Halt;
    use minijinja::{Value, context};
    use serde_json::json;

    /// After a client disconnected, a rendering used to run on to its end, which took 12 s. In this test the template
    /// itself signals the disconnect in the middle of its work.
    #[test]
    fn a_rendering_ends_when_its_client_leaves() {
        let tokenizer = crate::tokenizer::tests::tiny();
        for rest in [
            "{% for i in range(1000) %}{% for j in range(1000) %}{% endfor %}{% endfor %}",
            "{{ 'a' ~ 'b' }}",
            "{{ [1] | tojson }}",
            "{{ 'a'.upper() }}",
            "raw",
        ] {
            let halt = Halt::default();
            let client = halt.clone();
            let source = format!("a{{% if leave() %}}{{% endif %}}{rest}");
            let template = ChatTemplate::compiled("t", &source, |environment| {
                environment.add_function("leave", move || {
                    client.cancel();
                    Value::from(true)
                });
            })
            .unwrap();
            let render = || template.fill(context! {}, 0, &tokenizer, false);
            assert!(matches!(halt.run(render), Err(Error::Halted)), "{rest}");
            assert!(render().is_ok(), "{rest}: the halt outlived the work");
        }
        let late = Halt::new(Some(std::time::Instant::now()));
        let template = ChatTemplate::new("t", "a").unwrap();
        let rendered = late.run(|| template.fill(context! {}, 0, &tokenizer, false));
        assert!(matches!(rendered, Err(Error::Halted)));
    }

    /// Also of the template for tools.
    #[test]
    fn a_conversation_may_set_what_the_defaults_set() {
        let tokenizer = crate::tokenizer::tests::tiny();
        let source =
            "{{ 'on' if enable_thinking is not defined or enable_thinking else 'off' }}{{ bos_token }}";
        let template = || ChatTemplate::new("t", source).unwrap();
        let mut template = template().with_tool_use(template());
        let object = |value: serde_json::Value| value.as_object().unwrap().clone();
        let render = |template: &ChatTemplate, kwargs, tools: &[serde_json::Value]| {
            let kwargs = object(kwargs);
            let conversation =
                Conversation { messages: &[], tools, add_generation_prompt: true, kwargs: &kwargs };
            template.render_conversation(&conversation, &tokenizer).unwrap()
        };
        assert!(render(&template, json!({}), &[]).starts_with("on"));
        template.set_defaults(object(json!({"enable_thinking": false}))).unwrap();
        for tools in [&[][..], &[json!({"type": "function"})]] {
            assert!(render(&template, json!({}), tools).starts_with("off"));
            assert!(render(&template, json!({"enable_thinking": true}), tools).starts_with("on"));
        }
        assert!(template.render(&[], &tokenizer, true).unwrap().starts_with("off"));
        let error = template.set_defaults(object(json!({"messages": []}))).unwrap_err();
        assert!(error.to_string().contains("chat_template_kwargs.messages"), "{error}");
        assert!(render(&template, json!({}), &[]).starts_with("off"), "it is as before");
    }
}
