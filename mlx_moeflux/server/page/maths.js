// Maths in Markdown is shown as it was written. Markdown alone would take backslashes, underscores
// and asterisks out of it.

import { Tokenizer } from "./vendor/marked.esm.js";

// Bounds the search for an end that never comes, in characters.
const LONGEST = 4000;
// A formula holds no second mark of its own kind: a model that repeats the mark costs no time.
const part = (text) => String.raw`(?:(?!\n[ \t]*\x60{3})(?:${text}))`; // it ends before code
const DISPLAY = [
  { open: String.raw`\$\$(?!\$)`, part: part(String.raw`[^\\$]|\\[^]|\$(?!\$)`),
    close: String.raw`\$\$` },
  { open: String.raw`\\\[`, part: part(String.raw`[^\\]|\\[^[\]]`), close: String.raw`\\\]` },
  { open: String.raw`\\begin\{(?<name>\w+\*?)\}`,
    part: part(String.raw`(?!\\begin\{\k<name>\})[^]`),
    close: String.raw`\\end\{\k<name>\}` },
];
const WORDS = { open: String.raw`\\\(`, part: part(String.raw`[^\\]|\\[^()]`),
  close: String.raw`\\\)` };
// Prices are no maths: in "$5 and $10" a space stands before the second dollar, in "$5-$10" a digit
// behind it, in "$5 or 6$" a word behind the number.
const PRICE = String.raw`\d[\d.,]*\s+[*_]*[A-Za-z]{2}`;
const DOLLARS =
  String.raw`\$(?![\s$]|${PRICE})(?:[^\\$\x60]|\\[^]){1,${LONGEST}}?(?<!\s)\$(?!\d)`;
const OPEN_DOLLARS = String.raw`\$(?![\s$\d])(?:[^\\$\x60\n]|\\[^\n]){1,${LONGEST}}\\?$`;

const closed = (form) => `${form.open}${form.part}{1,${LONGEST}}?${form.close}`;
const unclosed = (form) => String.raw`${form.open}${form.part}{0,${LONGEST}}\\?$`;
const anyOf = (sources) => `(?:${sources.join("|")})`;

// A block fills a line, or has several. Its first mark begins a line, or ends one behind words;
// dollars within a line are no such mark.
const BLOCK = new RegExp(String.raw`^[ \t]*${anyOf(DISPLAY.map(closed))}[.,;]?[ \t]*\n?`);
const OPEN_BLOCK = new RegExp(String.raw`^[ \t]*${anyOf(DISPLAY.map(unclosed))}`);
const BLOCK_AHEAD = new RegExp([
  String.raw`^[ \t]*(?:\$\$.+?\$\$|\$\$|\\\[|\\begin\{)`,
  String.raw`(?<within>\$\$(?![ \t]*$)[^]+?\$\$)`,
  String.raw`(?:\$\$|\\\[)(?=[ \t]*$)`,
].join("|"), "gm");
const INLINE = anyOf([...[...DISPLAY, WORDS].map(closed), DOLLARS]);
const OPEN = anyOf([...[...DISPLAY, WORDS].map(unclosed), OPEN_DOLLARS]);
const INLINE_HERE = new RegExp(`^${INLINE}`);
const OPEN_HERE = new RegExp(`^${OPEN}`);
const OPEN_ANYWHERE = new RegExp(OPEN);
const CODE = String.raw`(?<ticks>\x60+)(?!\x60)[^]*?[^\x60]\k<ticks>(?!\x60)`;
const CODE_OR_MATHS = new RegExp(`${CODE}|${INLINE}`, "g");
const INLINE_AHEAD = /\$|\\[([]|\\begin\{/;
const UNDERLINE = /\n {0,3}(?:=+|-+)[ \t]*\n/;

// Options for marked. growing: Returns the text if it may go on, else "". Maths at its end that has
// no end yet counts, and has the class "open": it must not be mangled until the rest comes.
export function maths(growing, escaped) {
  const atEnd = (text) => growing() && growing().endsWith(text.trimEnd().split("\n").at(-1));
  const found = (text, whole, begun) => {
    const raw = whole.exec(text)?.[0];
    if (raw) return { raw, open: false };
    const rest = growing() && begun.exec(text)?.[0];
    return rest && atEnd(rest) ? { raw: rest, open: true } : null;
  };
  const inlineAt = (text) => found(text, INLINE_HERE, OPEN_HERE);
  const blockAt = (text) => {
    const one = found(text, BLOCK, OPEN_BLOCK);
    return one && (one.raw.includes("\n") || one.raw.length === text.length) ? one : null;
  };
  // Where in the paragraph that a text begins with a block begins, or -1.
  const blockIn = (text) => {
    const paragraph = text.split(/\n[ \t]*\n/, 1)[0];
    for (const { index, groups } of paragraph.matchAll(BLOCK_AHEAD)) {
      if (!groups.within && blockAt(text.slice(index))) return index;
    }
    return -1;
  };
  // What marked looks for the ends of emphasis in, with the formulas of `text` masked too: its end.
  const masked = (source, text) => {
    const formula = (raw) => "\0".repeat(raw.length);
    const marks = text
      .replace(CODE_OR_MATHS, (raw) => (raw[0] === "`" ? "a".repeat(raw.length) : formula(raw)))
      .replace(atEnd(text) ? OPEN_ANYWHERE : "", (raw) => formula(raw));
    const begin = source.length - text.length;
    return source.replace(/[^]/g, (one, i) => (marks[i - begin] === "\0" ? "a" : one));
  };
  let last = {}; // one text is asked about once for each of its marks
  const token = (type, one) => (one ? { type, ...one } : undefined);
  const shown = (tag) => ({ raw, open }) =>
    `<${tag} class="maths${open ? " open" : ""}">${escaped(raw.trim())}</${tag}>`;
  return {
    extensions: [
      { name: "blockMaths", level: "block", renderer: shown("p"),
        tokenizer: (text) => token("blockMaths", blockAt(text)) },
      { name: "inlineMaths", level: "inline", renderer: shown("span"),
        start: (text) => text.search(INLINE_AHEAD),
        tokenizer: (text) => token("inlineMaths", inlineAt(text)) },
    ],
    tokenizer: {
      // Emphasis neither begins nor ends in a formula.
      emStrong(text, source, before) {
        if (last.source !== source || last.whole !== growing() || !last.text.endsWith(text)) {
          last = { source, text, whole: growing(), masked: masked(source, text) };
        }
        return Tokenizer.prototype.emStrong.call(this, text, last.masked, before);
      },
      // "=" in a line of its own is the formula's: it makes no heading of the lines above.
      lheading(text) {
        const begin = blockIn(text);
        return begin < 0 || UNDERLINE.test(text.slice(0, begin)) ? false : undefined;
      },
      paragraph(text) {
        const begin = blockIn(text);
        return begin > 0 && Tokenizer.prototype.paragraph.call(this, text.slice(0, begin));
      },
    },
  };
}
