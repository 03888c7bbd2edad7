const parts = name => document.querySelectorAll(`.${name}`);
const drawn = data.builds.filter(build => build.blocks.lines.length);
const profiled = data.builds.filter(build => build.timelines.length);
drawn.forEach((build, index) => blocks(parts("blocks")[index], build.blocks));
profiled.forEach((build, index) => timelines(parts("timelines")[index], build.timelines));
