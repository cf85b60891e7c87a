// Lines about what the engine does: under a reply, and above the field for the next question.

export function bytes(count) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let i = 0;
  while (count >= 1000 && i < units.length - 1) {
    count /= 1000;
    i += 1;
  }
  return `${i && count < 100 ? count.toPrecision(3) : Math.round(count)} ${units[i]}`;
}

const percent = (share) => `${(100 * share).toFixed(1)} %`;
const plural = (count, noun) => `${count} ${noun}${count === 1 ? "" : "s"}`;

// One line about a finished reply.
export function numbersLine(numbers) {
  if (!numbers) return "";
  const { tokens, rate, firstSeconds, promptTokens, cachedTokens, hitRate, bytesRead } = numbers;
  const parts = [];
  if (tokens) parts.push(plural(tokens, "token"));
  if (rate) parts.push(`${rate.toFixed(1)} tokens/s`);
  if (firstSeconds !== undefined) parts.push(`first after ${firstSeconds.toFixed(1)} s`);
  if (promptTokens) parts.push(`prompt ${promptTokens} (${cachedTokens ?? 0} known)`);
  if (hitRate !== undefined) parts.push(`hit rate ${percent(hitRate)}`);
  if (bytesRead !== undefined) parts.push(`${bytes(bytesRead)} read`);
  return parts.join(" · ");
}

// The line of a running reply, and a prompt's progress.
export class EngineView {
  constructor(element) {
    this.line = element.querySelector(".line");
    this.progress = element.querySelector("progress");
  }

  // run: The reply under way. layers: Of the model.
  show(run, layers) {
    const now = run.now;
    const parts = [];
    const reading = run.tokens === 0;
    this.progress.hidden = !(reading && now?.prompts_reading);
    if (reading) {
      this.progress.value = now?.prompt_share ?? 0;
      parts.push(readingLine(now, layers));
    } else {
      parts.push(plural(run.tokens, "token"));
      if (run.rate) parts.push(`${run.rate.toFixed(1)} tokens/s`);
    }
    const experts = run.experts;
    if (experts) {
      parts.push(`hit rate ${percent(experts.hitRate)}`, `${bytes(experts.bytesRead)} read`);
    }
    if (now?.replies > 1) parts.push(queueLine(now));
    this.line.textContent = parts.join(" · ");
  }

  // counts: The server's since its start. A resident model looks no expert up.
  idle(counts) {
    this.progress.hidden = true;
    this.line.textContent = counts?.expert_lookups_total
      ? `Since the server's start: hit rate ${percent(counts.expert_hit_rate)}, ` +
        `${bytes(counts.expert_bytes_read_total)} read, ` +
        `${bytes(counts.prompt_cache_bytes_written_total)} of prompts written`
      : "";
    this.line.title = "Reading does not wear an SSD; writing does.";
  }
}

function readingLine(now, layers) {
  if (!now?.prompts_reading) return "Waiting for the engine";
  const what = now.prompts_reading > 1 ? `Reading ${now.prompts_reading} prompts` :
    "Reading the prompt";
  return `${what}: layer ${now.prompt_layers} of ${layers}, ${percent(now.prompt_share)}`;
}

function queueLine(now) {
  const waiting = now.prompts_waiting;
  return `queue: ${now.replies - waiting} running, ${waiting} waiting`;
}
